from __future__ import annotations

import pytest
from fake_core import request_of, spec_of

from loraplex.core import errors
from loraplex.core.request import EngineOutput, FinishReason, TokenLogprob
from loraplex.core.sampling import SamplingParams
from loraplex.core.stats import AdapterStats, EngineStats
from loraplex.core.tenants import TenantPolicy
from loraplex.server import protocol_ipc as ipc
from loraplex.server.pool.messages import Holder

COMMANDS: list[ipc.Command] = [
    ipc.Hello(),
    ipc.JoinPool("public", "secret"),
    ipc.AddRequest(request_of("a", adapter="v1"), (Holder("tcp://10.0.0.7:5555", awaited=True),)),
    ipc.Cancel("a"),
    ipc.AddAdapter(spec_of("v1"), (Holder("tcp://[::1]:5555"),)),
    ipc.RemoveAdapter("v1"),
    ipc.SetTenants((TenantPolicy(name="a", share=0.5, priority=-1, slo_ttft=2.0, slo_tpt=0.1),)),
    ipc.GetStats(),
    ipc.Shutdown(),
]
LOGPROB = TokenLogprob(token_id=3, logprob=-0.5, top=((3, -0.5), (4, -2.0)))
EVENTS: list[ipc.Event] = [
    ipc.Listening("ipc:///tmp/x/commands.sock"),
    ipc.PoolJoined("tcp://10.0.0.7:5555"),
    ipc.StartProgress("weights", 0.25),
    ipc.Loaded(),
    ipc.Ready(num_kv_blocks=10, max_model_len=64, load_s=1.5),
    ipc.Failed(ipc.ErrorInfo("LoraplexError", "no")),
    ipc.Outputs(
        [
            EngineOutput(
                request_id="a", token_ids=(3,), logprobs=(LOGPROB,), prompt_logprobs=(None, LOGPROB)
            ),
            EngineOutput(request_id="b", finish_reason=FinishReason.STOP, stop_token_id=2),
        ]
    ),
    ipc.Rejected("a", ipc.ErrorInfo("InvalidRequestError", "no", "prompt")),
    ipc.AdapterAdded("v1"),
    ipc.AdapterRemoved("v1", ipc.ErrorInfo("UnknownModelError", "no")),
    ipc.Stats(
        EngineStats(
            num_steps=4,
            adapters=(AdapterStats(version="v1", tier="host", num_bytes=1, in_flight=0, loads=1),),
        )
    ),
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda message: type(message).__name__)
def test_a_command_arrives_as_it_was_sent(command: ipc.Command) -> None:
    assert ipc.decode_command(ipc.encode(command)) == command


@pytest.mark.parametrize("event", EVENTS, ids=lambda message: type(message).__name__)
def test_an_event_arrives_as_it_was_sent(event: ipc.Event) -> None:
    assert ipc.decode_event(ipc.encode(event)) == event


def test_every_field_of_a_request_survives_the_way() -> None:
    params = SamplingParams(
        max_tokens=9, seed=-5, logit_bias=((1, 2.5),), stop=("x",), stop_token_ids=(7,), logprobs=0
    )
    request = request_of("a")
    sent = ipc.AddRequest(
        type(request)(
            request_id="a",
            prompt_token_ids=[1],
            params=params,
            eos_token_ids=(2,),
            tenant="acmé",
            priority=-(1 << 63),
            cache_salt="salt",
        )
    )
    received = ipc.decode_command(ipc.encode(sent))
    assert isinstance(received, ipc.AddRequest)
    assert received.request == sent.request


def _all_errors(root: type[errors.LoraplexError]) -> list[type[errors.LoraplexError]]:
    return [root, *(found for child in root.__subclasses__() for found in _all_errors(child))]


# Errors private to a module never come from the engine, and exist here only if it was imported.
_SHARED_ERRORS = [error for error in _all_errors(errors.LoraplexError) if error.__module__ == errors.__name__]


@pytest.mark.parametrize("error_class", _SHARED_ERRORS)
def test_an_error_is_raised_as_the_class_it_was(error_class: type[errors.LoraplexError]) -> None:
    received = ipc.ErrorInfo.of(error_class("what to do")).to_error()
    assert type(received) is error_class
    assert str(received) == "what to do"


def test_an_error_keeps_the_field_it_names() -> None:
    request_error = ipc.ErrorInfo.of(errors.InvalidRequestError("no", param="top_p")).to_error()
    assert isinstance(request_error, errors.InvalidRequestError)
    assert request_error.param == "top_p"
    adapter_error = ipc.ErrorInfo.of(errors.AdapterFormatError("no", field="r")).to_error()
    assert isinstance(adapter_error, errors.AdapterFormatError)
    assert adapter_error.field == "r"


def test_a_subclass_the_other_side_does_not_know_arrives_as_its_base() -> None:
    local_class = type("LocalError", (errors.AdapterMismatchError,), {})
    received = ipc.ErrorInfo("LocalError", "no").to_error()
    assert type(received) is errors.LoraplexError
    assert ipc.ErrorInfo.of(local_class("no")).kind == "AdapterMismatchError"


def test_what_has_no_encoding_is_refused_where_it_is_sent() -> None:
    with pytest.raises(NotImplementedError, match="object"):
        ipc.encode(ipc.Cancel(object()))  # type: ignore[arg-type]
