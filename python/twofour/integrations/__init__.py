"""2:4 weights where models are loaded and served: Hugging Face transformers and vLLM."""
