"""Forms of a batch outside of DataProto: pickle, safetensors file, TensorDict, Arrow table."""
