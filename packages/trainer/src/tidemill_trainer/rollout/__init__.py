"""Generation by SGLang engines in Ray actors."""
