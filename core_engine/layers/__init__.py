"""What decoders are made of: one module per kind of layer, each over the kernels."""
