"""The interface of all training engines, and their steps that do not depend on the backend."""
