"""What is wrong with a request, in one line each, before it reaches a step."""

from __future__ import annotations

import math

from modelworks.config import UserError, show_value
from modelworks.serve.options import EngineOptions
from modelworks.serve.params import SamplingParams
from modelworks.serve.request import Request


def check_request(request: Request, options: EngineOptions, *, vocab_size: int, max_model_len: int) -> None:
    """Raise UserError for a request that this engine can never run. Rooms in its cache are not looked at here."""
    prompt, params = request.prompt, request.params
    if not isinstance(params, SamplingParams):
        raise UserError(f"params: got {show_value(params)}, expected SamplingParams")
    if not isinstance(request.id, str) or not request.id:
        raise UserError(f"id: got {show_value(request.id)}, expected some text")
    if not prompt:
        raise UserError("prompt: it holds no tokens; give some text, or the token that begins a document")
    if any(type(token) is not int for token in prompt):
        wrong = next(token for token in prompt if type(token) is not int)
        raise UserError(f"prompt: got {show_value(wrong)} among its token ids, expected whole numbers")
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = min(prompt) if min(prompt) < 0 else max(prompt)
        raise UserError(f"prompt: token id {wrong} is not in the vocabulary, expected 0 to {vocab_size - 1}")
    if len(prompt) >= max_model_len:
        raise UserError(
            f"prompt: it has {len(prompt)} tokens, but prompt and completion together have {max_model_len} at most; "
            f"shorten it to {max_model_len - 1}"
        )
    if params.n_sequences > options.max_running:
        name = "beams" if params.beams else "best_of" if params.best_of else "n"
        raise UserError(
            f"{name}: got {params.n_sequences}, but at most {options.max_running} sequences run at once (max_running)"
        )
    if isinstance(request.priority, bool) or not isinstance(request.priority, int) or abs(request.priority) > 2**31:
        raise UserError(f"priority: got {show_value(request.priority)}, expected a whole number from -2^31 to 2^31")
    deadline = request.deadline
    if deadline is not None and not (isinstance(deadline, (int, float)) and 0 < deadline < math.inf):
        raise UserError(f"deadline: got {show_value(deadline)}, expected seconds > 0")
    if not _is_unicode(request.salt):
        raise UserError(f"salt: got {show_value(request.salt)}, expected Unicode text")
    params.check_against(vocab_size, max_model_len)


def _is_unicode(text: object) -> bool:
    """Whether it is text without half characters (surrogates), which no bytes stand for."""
    return isinstance(text, str) and not any("\ud800" <= character <= "\udfff" for character in text)
