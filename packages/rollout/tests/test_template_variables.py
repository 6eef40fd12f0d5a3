"""Tools and variables that a chat template ignores are refused."""

import pytest
from template_cases import CHATML, FAMILIES, QWEN3, QWEN25, TOOLS, WITH_TOOLS, user
from tidemill_rollout import ChatTemplate, TemplateError
from tidemill_rollout.template_variables import variables

USER = user("hello")


def render(template: ChatTemplate, tools=TOOLS) -> str:
    return template.render([USER], tools, add_generation_prompt=True)


@pytest.fixture
def chatml(bpe):
    """A tokenizer whose template the test may change."""
    tokenizer = CHATML.tokenizer(bpe)
    yield tokenizer
    tokenizer.chat_template = CHATML.template


def test_tools_that_the_template_ignores_are_refused(chatml):
    with pytest.raises(TemplateError, match="the chat template ignores tools, and there are 1"):
        render(ChatTemplate(chatml))
    assert "hello" in render(ChatTemplate(chatml), tools=None)


@pytest.mark.parametrize("family", WITH_TOOLS, ids=lambda family: family.name)
def test_tools_that_the_template_renders_are_accepted(family, bpe):
    assert "weather" in render(ChatTemplate(family.tokenizer(bpe)))


def test_template_for_tools_is_checked_where_there_are_several(chatml):
    chatml.chat_template = {"default": CHATML.template, "tool_use": QWEN25.template}
    assert "weather" in render(ChatTemplate(chatml))
    chatml.chat_template = {"default": QWEN25.template, "tool_use": CHATML.template}
    with pytest.raises(TemplateError, match="ignores tools"):
        render(ChatTemplate(chatml))


def test_unknown_template_kwargs_are_refused(bpe, chatml):
    with pytest.raises(TemplateError, match=r"does not use enable_thinkin; its variables are .*enable_thinking"):
        ChatTemplate(QWEN3.tokenizer(bpe), kwargs={"enable_thinkin": False})
    ChatTemplate(QWEN3.tokenizer(bpe), kwargs={"enable_thinking": False, "documents": []})
    chatml.chat_template = {"default": CHATML.template, "tool_use": QWEN3.template}
    ChatTemplate(chatml, kwargs={"enable_thinking": False})
    chatml.chat_template = None
    ChatTemplate(chatml, kwargs={"enable_thinking": False})


def test_tokenizer_that_renders_by_itself_is_not_checked(bpe):
    class Own(type(CHATML.tokenizer(bpe))):
        def apply_chat_template(self, conversation, **kwargs):
            return f"{kwargs['tools'][0]['function']['name']} {kwargs['style']}"

    tokenizer = Own(tokenizer_object=CHATML.tokenizer(bpe).backend_tokenizer, chat_template=CHATML.template)
    assert render(ChatTemplate(tokenizer, kwargs={"style": "short"})) == "weather short"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{% generation %}{{ tools }}{% endgeneration %}", {"tools"}),
        ("{% for message in messages %}{% break %}{% endfor %}", {"messages"}),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}{{ tools }}", {"tools"}),
        ("{% set tools = [] %}{{ tools }}", set()),
        ("{{ raise_exception(strftime_now('%d')) | tojson }}", {"raise_exception", "strftime_now"}),
        ("{% include 'other' %}", None),
        ("{% import 'other' as other %}", None),
        ("{% unknown_tag %}", None),
        ("{{ tools | unknown_filter }}", None),
    ],
)
def test_variables_of_a_template_are_found_as_transformers_parses_it(source, expected):
    assert variables(source) == expected


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_variables_of_published_templates_are_found(family):
    found = variables(family.template)
    assert {"messages", "add_generation_prompt"} & found
    assert ("tools" in found) or not family.call
