"""Groups and layers for tensor, context, pipeline, data and expert parallelism."""
