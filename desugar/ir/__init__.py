"""Records that all stages read: values, graphs, storages."""
