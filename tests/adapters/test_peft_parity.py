"""Our reading of a checkpoint against PEFT's own: real models, real save_pretrained, module by module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapter_factory import SHAPE
from examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from loraplex.adapters.peft_config import judge_config
from loraplex.adapters.peft_reader import read_adapter
from loraplex.adapters.targets import plan_targets
from loraplex.core.errors import AdapterFormatError
from loraplex.core.modules import MODULES, module_path

peft = pytest.importorskip("peft")
torch = pytest.importorskip("torch")

MakeAdapter = Callable[..., None]


@pytest.fixture(scope="module")
def make_base() -> Callable[[], Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=SHAPE.num_layers,
        hidden_size=SHAPE.hidden_size,
        intermediate_size=SHAPE.intermediate_size,
        num_attention_heads=SHAPE.num_heads,
        num_key_value_heads=SHAPE.num_kv_heads,
        head_dim=SHAPE.head_dim,
        vocab_size=SHAPE.vocab_size,
    )
    torch.manual_seed(0)
    weights = LlamaForCausalLM(config).state_dict()

    def make() -> Any:
        model = LlamaForCausalLM(config)
        model.load_state_dict(weights)
        return model

    return make


@pytest.fixture
def save_with_peft(make_base: Callable[[], Any], tmp_path: Path) -> MakeAdapter:
    def save(*, dtype: Any = None, **fields: Any) -> None:
        model = peft.get_peft_model(make_base(), peft.LoraConfig(**fields))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_()
        if dtype is not None:
            model.to(dtype)
        model.save_pretrained(tmp_path)

    return save


def peft_layers(model: Any) -> dict[str, Any]:
    """Every LoRA layer by its name in the base model."""
    base = model.get_base_model()
    return {
        name: layer for name, layer in base.named_modules() if isinstance(layer, peft.tuners.lora.LoraLayer)
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["q_proj", "v_proj"], "r": 4, "lora_alpha": 16},
        {"target_modules": ["q_proj"], "r": 6, "lora_alpha": 7, "use_rslora": True},
        {"target_modules": list(MODULES), "r": 2},
        {"target_modules": "all-linear", "r": 3},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj", "model.layers.1.self_attn.q_proj"]},
        {"target_modules": "all-linear", "exclude_modules": r"model\.layers\.[02]\..*"},
        {"target_modules": r".*\.(q|k)_proj"},
        {"target_modules": r"model\.layers\.(1|3)\.mlp\.(up|down)_proj"},
        {"target_modules": ["self_attn.q_proj", "model.layers.2.mlp.up_proj"]},
        {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": ["o_proj"], "layers_to_transform": 3, "layers_pattern": "layers"},
        {"target_modules": ["q_proj", "model.layers.0.mlp.up_proj"], "layers_to_transform": [2]},
        {
            "target_modules": ["q_proj", "k_proj", "down_proj"],
            "r": 8,
            "lora_alpha": 16,
            "rank_pattern": {"k_proj": 2, "^model.layers.0.mlp.down_proj": 5, "layers.1.self_attn.q_proj": 3},
            "alpha_pattern": {r"layers\.[23]\.self_attn\.q_proj": 64, "down_proj": 1},
        },
        {
            "target_modules": ["q_proj", "v_proj"],
            "use_rslora": True,
            "rank_pattern": {"layers.0.self_attn.q_proj": 5, "q_proj": 3},
            # PEFT sorts the keys when it saves, so the one that wins after loading is the longer one.
            "alpha_pattern": {"v_proj": 0.5, "layers.1.self_attn.v_proj": 2},
        },
        {"target_modules": ["q_proj"], "lora_dropout": 0.3, "init_lora_weights": "gaussian"},
        {"target_modules": ["q_proj"], "init_lora_weights": "orthogonal"},
    ],
)
def test_ranks_scales_and_weights_equal_those_of_peft(
    fields: dict[str, Any], save_with_peft: MakeAdapter, make_base: Callable[[], Any], tmp_path: Path
) -> None:
    from safetensors.numpy import load_file

    save_with_peft(**fields)
    spec = read_adapter(tmp_path, SHAPE)
    layers = peft_layers(peft.PeftModel.from_pretrained(make_base(), tmp_path))
    assert {module_path(each.layer, each.module) for each in spec.modules} == set(layers)
    tensors = load_file(spec.weights_path)
    num_params = 0
    for each in spec.modules:
        layer = layers[module_path(each.layer, each.module)]
        assert each.rank == layer.r["default"]
        assert each.scale == layer.scaling["default"]
        delta = each.scale * tensors[each.b_name] @ tensors[each.a_name]
        expected = layer.get_delta_weight("default").detach().numpy()
        np.testing.assert_allclose(delta, expected, rtol=1e-5, atol=1e-6)
        num_params += tensors[each.a_name].size + tensors[each.b_name].size
    assert spec.num_params == num_params
    assert list(spec.modules) == sorted(
        spec.modules, key=lambda each: (each.layer, MODULES.index(each.module))
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_checkpoints_are_read(dtype: str, save_with_peft: MakeAdapter, tmp_path: Path) -> None:
    save_with_peft(target_modules=["q_proj"], dtype=getattr(torch, dtype))
    assert len(read_adapter(tmp_path, SHAPE).modules) == SHAPE.num_layers


@pytest.mark.parametrize("init", ["pissa", "olora", "mica", "orthogonal", "gaussian", True])
def test_initialisations_are_refused_exactly_if_peft_changes_the_base(
    init: object, make_base: Callable[[], Any], tmp_path: Path
) -> None:
    model = peft.get_peft_model(
        make_base(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=init)
    )
    model.save_pretrained(tmp_path)
    before = make_base().model.layers[0].self_attn.q_proj.weight
    after = model.get_base_model().model.layers[0].self_attn.q_proj.base_layer.weight
    if torch.equal(before, after):
        read_adapter(tmp_path, SHAPE)
    else:
        with pytest.raises(AdapterFormatError, match="init_lora_weights"):
            read_adapter(tmp_path, SHAPE)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"target_modules": ["q_proj"], "use_dora": True}, "use_dora"),
        ({"target_modules": ["q_proj"], "lora_bias": True}, "lora_bias"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, "target_modules"),
        ({"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}, "modules_to_save"),
    ],
)
@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`:UserWarning")
@pytest.mark.filterwarnings("ignore:.*has no bias")
@pytest.mark.filterwarnings("ignore:Adapter 'default'. 4 LoRA tensor")
def test_what_peft_saves_beyond_plain_lora_is_refused(
    fields: dict[str, Any], field: str, save_with_peft: MakeAdapter, tmp_path: Path
) -> None:
    save_with_peft(**fields)
    with pytest.raises(AdapterFormatError) as caught:
        read_adapter(tmp_path, SHAPE)
    assert caught.value.field == field


_KEYS = [module_path(layer, module) for layer in range(SHAPE.num_layers) for module in MODULES]
_NAMES = st.sampled_from(
    [
        "q_proj",
        "proj",
        "mlp.up_proj",
        "self_attn.k_proj",
        "layers.1.mlp.gate_proj",
        *_KEYS[5:9],
        "model",
        "v.proj",
    ]
)
_PATTERN_NAMES = _NAMES | st.sampled_from(
    ["^model.layers.0.self_attn.q_proj", "q.proj", "^q_proj", "0.mlp.up_proj"]
)


@settings(max_examples=examples(60, 150), deadline=None)
@given(
    targets=st.lists(_NAMES, min_size=1, max_size=4),
    exclude=st.none() | st.lists(_NAMES, max_size=2),
    layers=st.none() | st.integers(0, 5) | st.lists(st.integers(0, 5), max_size=3),
    layers_pattern=st.sampled_from([None, "layers", ["h", "layers"], "model.layers"]),
    rank_pattern=st.dictionaries(_PATTERN_NAMES, st.integers(1, 9), max_size=3),
    alpha_pattern=st.dictionaries(_PATTERN_NAMES, st.integers(1, 9), max_size=3),
)
def test_matching_rules_agree_with_the_functions_of_peft(
    targets: list[str],
    exclude: list[str] | None,
    layers: int | list[int] | None,
    layers_pattern: str | list[str] | None,
    rank_pattern: dict[str, int],
    alpha_pattern: dict[str, int],
) -> None:
    from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists
    from peft.utils.other import get_pattern_key

    fields = {
        "target_modules": targets,
        "exclude_modules": exclude,
        "layers_to_transform": layers,
        "layers_pattern": layers_pattern if layers not in (None, []) else None,
    }
    config = {"peft_type": "LORA", "rank_pattern": rank_pattern, "alpha_pattern": alpha_pattern} | fields
    verdict = judge_config(config)
    assert verdict.settings is not None
    plan = plan_targets(verdict.settings, SHAPE)
    expected = []
    for key in _KEYS:
        found = check_target_module_exists(SimpleNamespace(**fields, modules_to_save=None), key)
        if found and not isinstance(found, _ExcludedModule):
            rank = rank_pattern.get(get_pattern_key(rank_pattern.keys(), key), 8)
            alpha = alpha_pattern.get(get_pattern_key(alpha_pattern.keys(), key), 8)
            expected.append((key, rank, alpha / rank))
    found_here = [(module_path(each.layer, each.module), each.rank, each.scale) for each in plan.modules]
    assert found_here == expected
