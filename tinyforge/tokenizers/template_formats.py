"""Chat templates in other programs' formats: Jinja for llama.cpp and transformers, Go templates for Ollama.

    jinja(TEMPLATES["chatml"])          "{% for m in messages %}..."
    modelfile(TEMPLATES["chatml"], "model.gguf", ["<|im_end|>"], {"num_ctx": 2048})

Both are generated from the frames of a `Template`, and give the same text as `Template.render`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

from tinyforge.tokenizers.chat_templates import END_OF_REPLY, Frame, Piece, Special, Template


def jinja(template: Template, bos: bool = False) -> str:
    """The template as a `chat_template`: a program over `messages`, `add_generation_prompt` and `eos_token`. bos: it
    begins with `bos_token`."""
    content = "m['content'] | trim" if template.strips else "m['content']"

    def terms(pieces: Iterable[Piece]) -> list[str]:
        return ["eos_token" if piece == Special(END_OF_REPLY) else json.dumps(_text(piece)) for piece in pieces]

    def written(terms: Sequence[str]) -> str:  # an expression: white space between two tags may be stripped
        return f"{{{{ {' + '.join(terms)} }}}}" if terms else ""

    def around(frame: Frame, content: str) -> str:
        return written([*terms(frame.before), content, *terms(frame.after)])

    kinds = (("if", "system", template.system), ("elif", "user", template.user), ("elif", "assistant", template.reply))
    branches = "".join(f"{{% {word} m['role'] == '{role}' %}}{around(frame, content)}" for word, role, frame in kinds)
    return (
        f"{'{{ bos_token }}' * bos}{{% for m in messages %}}{branches}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{written(terms(template.reply.before))}{{% endif %}}"
    )


def modelfile(template: Template | None, model: str, stops: Sequence[str], parameters: Mapping[str, float]) -> str:
    """Ollama's Modelfile. template: None leaves it to the .gguf file's. model: the name of that file, next to it.
    stops: the texts that end a reply. parameters: others, num_ctx, the context, among them.

    Ollama renders each turn with TEMPLATE, and begins a reply at .Response.
    """

    def around(frame: Frame, name: str) -> str:
        return f"{''.join(map(_text, frame.before))}{{{{ {name} }}}}{''.join(map(_text, frame.after))}"

    lines = [f"FROM ./{model}"]
    if template is not None:
        turn = (
            f"{{{{ if .System }}}}{around(template.system, '.System')}{{{{ end }}}}"
            f"{{{{ if .Prompt }}}}{around(template.user, '.Prompt')}{{{{ end }}}}{around(template.reply, '.Response')}"
        )
        lines.append(f'TEMPLATE """{turn}"""')
    lines += [f'PARAMETER stop "{text}"' for text in stops]
    lines += [f"PARAMETER {name} {value}" for name, value in parameters.items()]
    return "\n".join([*lines, ""])


def _text(piece: Piece) -> str:
    return piece.text if isinstance(piece, Special) else str(piece)
