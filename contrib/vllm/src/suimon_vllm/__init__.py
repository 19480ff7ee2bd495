"""vLLM as a backend of Suimon. The plugin is ``suimon_vllm.backend``."""
