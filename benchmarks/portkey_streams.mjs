// Portkey 1.15 appends headers to the response that it fetched, which Node 20 refuses (every stream would be a 500):
// here it gets a new response, whose headers may be changed.
const original = globalThis.fetch;

globalThis.fetch = async (...request) => {
  const fetched = await original(...request);
  return new Response(fetched.body, fetched);
};
