"""`gdn bench`: kernels against the bandwidth of the memory that feeds them, and against other implementations."""
