"""SERVING: `vllm serve` with the plugin on and off, under `vllm bench serve`; vLLM runs in processes of its own."""
