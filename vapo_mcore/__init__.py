"""VAPO and its lineage on Megatron-Core and vLLM. Importing this package imports neither torch nor Megatron."""

__version__ = "0.1.0"
