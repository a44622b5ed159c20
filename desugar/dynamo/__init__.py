"""The interface to TorchDynamo: the backend, Dynamo's guards, and calls that skip Dynamo's frame hook."""
