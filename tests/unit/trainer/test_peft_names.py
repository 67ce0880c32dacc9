"""PEFT's wrappers: which name and which weight is meant, and what is refused."""

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, get_peft_model
from tests.multiprocess.trainer.reading import read
from tests.support.checkpoints import make_model

from reshard.board import Deadline
from reshard.errors import LayoutError
from reshard_trainer.ensemble import Ensemble
from reshard_trainer.sources import ModuleSource


def _adapted(**options: Any) -> Any:
    torch.manual_seed(5)
    settings = {"r": 2, "target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    return get_peft_model(make_model("llama", seed=1), LoraConfig(**{**settings, **options}))


def _published(model: Any) -> dict[str, torch.Tensor]:
    source = ModuleSource(model, Ensemble.current())
    source.prepare(Deadline.after(5))
    return read(source)


def _merged(**options: Any) -> dict[str, torch.Tensor]:
    """PEFT's own merge of the same model."""
    return dict(_adapted(**options).merge_and_unload().state_dict())


def _same(held: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(held) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(held[name], tensor), name


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "lora_alpha": 16},
        {"target_modules": ["embed_tokens", "v_proj"], "modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 5}},
    ],
)
def test_what_is_published_is_what_peft_merges(options: dict[str, Any]) -> None:
    _same(_published(_adapted(**options)), _merged(**options))


def test_bfloat16_is_rounded_as_peft_rounds_it() -> None:
    held = _published(_adapted().bfloat16())

    _same(held, dict(_adapted().bfloat16().merge_and_unload().state_dict()))


def test_adapters_that_are_merged_already_are_not_added_twice() -> None:
    model = _adapted()
    model.merge_adapter()

    _same(_published(model), _merged())


def test_two_adapters_of_which_one_is_active() -> None:
    model = _adapted()
    model.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))

    _same(_published(model), _merged())


def test_adapters_that_transformers_itself_put_in() -> None:
    torch.manual_seed(5)
    model = make_model("llama", seed=1)
    config = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    model.add_adapter(config)

    _same(_published(model), _merged())


def test_values_follow_the_factors_and_the_base_stays() -> None:
    model = _adapted()
    source = ModuleSource(model, Ensemble.current())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for _ in range(3):
        source.refresh()
        source.prepare(Deadline.after(5))
        _same(read(source), _merged())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
    source.refresh()
    source.prepare(Deadline.after(5))
    _same(read(source), dict(make_model("llama", seed=1).state_dict()))


def _dora() -> Any:
    return _adapted(use_dora=True, target_modules=["q_proj"])


def _disabled() -> Any:
    model = _adapted(target_modules=["q_proj"])
    model.base_model.disable_adapter_layers()
    return model


def _ia3() -> Any:
    config = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    return get_peft_model(make_model("llama", seed=1), config)


def _prompt() -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    return get_peft_model(make_model("llama", seed=1), config)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            _dora,
            "self_attn.q_proj: adapter default is a DoraLinearVariant, not plain LoRA",
        ),
        (_disabled, "q_proj: its adapters are disabled; enable them before publishing"),
        (
            _ia3,
            "k_proj: adapted by peft.tuners.ia3.layer.Linear; only LoRA of linear",
        ),
        (_prompt, "the model: prompt learning adds no weights that an engine could load"),
    ],
)
def test_what_cannot_be_merged_is_named(make: Callable[[], Any], text: str) -> None:
    with pytest.raises(LayoutError) as caught:
        ModuleSource(make(), Ensemble.current())

    assert "these adapters cannot be merged; nothing was sent" in str(caught.value)
    assert any(text in fault for fault in caught.value.faults), caught.value.faults
