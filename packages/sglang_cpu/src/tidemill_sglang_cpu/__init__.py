"""Stock SGLang on any CPU: an SGLang platform plugin."""

from tidemill_sglang_cpu.activation import activate

__all__ = ["activate"]
