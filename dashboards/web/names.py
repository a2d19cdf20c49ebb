"""What pages call the classes of tokens, and the parts of an amount."""

CLASS_NAMES = {
    "input_fresh": "Input, fresh",
    "input_cached": "Input, cached",
    "input_cache_write": "Input, cache write",
    "output_text": "Output, text",
    "output_reasoning": "Output, reasoning",
}
PART_NAMES = CLASS_NAMES | {"request": "Request", "image": "Images", "device": "Device time"}
