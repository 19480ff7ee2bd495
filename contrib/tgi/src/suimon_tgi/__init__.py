"""Text Generation Inference (TGI) servers as backends of Suimon."""
