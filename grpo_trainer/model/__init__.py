"""The trained model: checks, loading, LoRA adapter, tokenizer, reference and export."""
