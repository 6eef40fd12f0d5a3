"""Stock SGLang on any x86-64 CPU: an SGLang platform plugin."""

from tidemill_sglang_cpu.activation import activate

__all__ = ["activate"]
