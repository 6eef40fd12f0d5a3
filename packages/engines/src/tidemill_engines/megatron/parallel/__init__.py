"""Process groups, data parallelism, context parallelism, and sums over pipeline stages."""
