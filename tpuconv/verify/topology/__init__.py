"""What the TPU compiler says of a model, without a TPU."""
