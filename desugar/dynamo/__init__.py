"""What stands between TorchDynamo and the pipeline: the backend, guards, and calls past the frame hook."""
