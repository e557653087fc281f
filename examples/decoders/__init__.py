"""A decoder for the weights of Llama, Qwen3 and Gemma, and the rules for the names and layout of the hub."""
