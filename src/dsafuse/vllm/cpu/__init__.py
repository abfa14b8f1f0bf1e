"""DeepSeek Sparse Attention on vLLM's CPU build, in plain torch: what vLLM has only for GPUs.

vLLM 0.32 refuses sparse attention on CPU. Five pieces are missing there, and each has its file here: the
platform that accepts it (platform), a sparse MLA backend (backend), an indexer backend with scoring and
top-k (indexer), the group quantisation of the index query (formats), and the wiring (install).

It is made to be right and easy to read, for tests and demonstrations; it is not made to be fast. Both arms
of a comparison run on it: the one that uses dsafuse's fused preparation and the one that uses vLLM's own.
"""
