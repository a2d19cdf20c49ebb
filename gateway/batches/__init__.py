"""OpenAI's files and batches: content and claims live in PostgreSQL, every gateway process works on them."""
