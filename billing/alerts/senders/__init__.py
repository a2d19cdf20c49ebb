"""How each kind of channel is spoken to: one file a kind makes the request and reads the answer."""
