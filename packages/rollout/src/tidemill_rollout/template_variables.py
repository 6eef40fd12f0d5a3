"""The variables that a chat template reads."""

import functools

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class _GenerationBlock(Extension):
    """`{% generation %}`, which transformers adds to Jinja."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(extensions=[_GenerationBlock, "jinja2.ext.loopcontrols"])
_OTHER_TEMPLATES = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


@functools.lru_cache(16)
def variables(source: str) -> frozenset[str] | None:
    """Return the names that a template may read without setting them, also those that it sets on some paths only.

    Returns:
        The names; None if they are unknown, because the template cannot be parsed or uses other templates.
    """
    try:
        tree = _ENVIRONMENT.parse(source)
        return None if any(tree.find_all(_OTHER_TEMPLATES)) else frozenset(meta.find_undeclared_variables(tree))
    except jinja2.TemplateError:
        return None
