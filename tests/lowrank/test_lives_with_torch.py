"""Factorized layers of every kind do what PyTorch's own layers do, wherever PyTorch takes them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from every_kind import CASES, Around, Case, ungrouped
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import takifugu as tk
from takifugu.errors import LayerError, StructureError, TakifuguWarning, UsageError
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.layers import KINDS

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
MEMORY = {4: torch.channels_last, 5: torch.channels_last_3d}
IMAGE_CASES = {name: case for name, case in CASES.items() if case.kind.endswith(("2d", "3d"))}


def only(kind: str) -> Case:
    return next(case for case in CASES.values() if case.kind == kind)


def step(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, dict[str, Tensor]]:
    """Output, and the gradient of every parameter."""
    output = model(*inputs)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad((output.float() * direction).sum(), parameters)
    return output.detach(), dict(zip(names, gradients, strict=True))


def test_no_kind_is_missing() -> None:
    assert {case.kind for case in CASES.values()} == set(KINDS)
    for kind, layer in KINDS.items():
        schemes = {case.scheme or layer.schemes[0] for case in CASES.values() if case.kind == kind}
        assert schemes == {s for s in layer.schemes if s != "separable" or kind.endswith("2d")}


# ---- compilers and exporters -----------------------------------------------------------------------


@every_case
def test_compiled_is_eager(case: Case) -> None:
    torch.compiler.reset()
    model, inputs = case.factorized(), case.example()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    output, gradients = step(compiled, inputs)
    gradients = {name.removeprefix("_orig_mod."): gradient for name, gradient in gradients.items()}
    torch.testing.assert_close((output, gradients), step(model, inputs))


@pytest.mark.slow
@every_case
def test_inductor_is_eager(case: Case) -> None:
    torch.compiler.reset()
    model, inputs = case.factorized(), case.example()
    compiled_output = torch.compile(model, fullgraph=True)(*inputs)
    torch.testing.assert_close(compiled_output, model(*inputs), rtol=1e-4, atol=1e-5)


@every_case
def test_exported_is_eager(case: Case) -> None:
    model = case.factorized().eval()
    program = torch.export.export(model, case.example())
    other = case.example(seed=5)
    torch.testing.assert_close(program.module()(*other), model(*other))


def _onnx_cases() -> list[Any]:
    """The exporter takes seconds: of several variants, schemes and dimensions, one stands for the others."""
    often = {case.kind: name for name, case in CASES.items() if not case.scheme and not case.variant}
    for kind in ("conv1d", "conv3d", "conv_transpose1d", "conv_transpose3d"):
        del often[kind]
    often["separable"] = "conv2d-separable"
    return [
        pytest.param(ungrouped(case), id=name, marks=[] if name in often.values() else [pytest.mark.slow])
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize("case", _onnx_cases())
def test_onnx_is_eager(case: Case) -> None:
    pytest.importorskip("onnxscript")
    reference = pytest.importorskip("onnx.reference")
    model = case.factorized().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model, case.example(), dynamo=True, verbose=False)
    proto = program.model_proto
    other = case.example(seed=5)
    feed = {node.name: tensor.numpy() for node, tensor in zip(proto.graph.input, other, strict=True)}
    (output,) = reference.ReferenceEvaluator(proto).run(None, feed)
    torch.testing.assert_close(torch.from_numpy(output), model(*other).detach(), rtol=1e-4, atol=1e-5)
    # Low-rank it stays: the file holds the factors and not their product.
    stored = sum(torch.Size(tensor.dims).numel() for tensor in proto.graph.initializer)
    assert stored < 1.2 * sum(p.numel() for p in model.parameters()) + 32


# ---- dtypes and memory formats -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@every_case
def test_autocast_is_like_denses(case: Case, dtype: torch.dtype) -> None:
    dense, model, inputs = case.build(), case.factorized(), case.example()
    plain, _ = step(model, inputs)
    with torch.autocast("cpu", dtype=dtype):
        try:
            wanted, _ = step(dense, inputs)
        except RuntimeError as error:
            pytest.skip(f"torch's own layer does not do {dtype} here: {error}")
        output, gradients = step(model, inputs)
        wanted_inside = case.call(dense.layer, *inputs)
        inside = case.call(model.layer, *inputs)
    assert output.dtype == wanted.dtype
    assert inside.dtype == wanted_inside.dtype
    digits = torch.finfo(dtype).eps * 8
    torch.testing.assert_close(output.float(), plain, rtol=digits, atol=digits)
    assert not torch.equal(output.float(), plain)  # it did go down
    for name, gradient in gradients.items():
        assert gradient.isfinite().all(), name
        assert gradient.dtype == torch.float32, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=["bf16", "fp64"])
@every_case
def test_factors_have_the_models_dtype(case: Case, dtype: torch.dtype) -> None:
    model = case.build().to(dtype)
    case.factorize_(model)
    assert {p.dtype for p in model.parameters()} == {dtype}
    tk.densify_(model)
    assert {p.dtype for p in model.parameters()} == {dtype}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", IMAGE_CASES.values(), ids=IMAGE_CASES)
def test_channels_last_stays(case: Case, when: str) -> None:
    model, inputs = case.build(), case.example()
    memory_format = MEMORY[inputs[0].dim()]
    if when == "before":
        model = model.to(memory_format=memory_format)
    case.factorize_(model)
    if when == "after":
        model = model.to(memory_format=memory_format)
    for weight in model.layer.factor_parameters():
        assert weight.is_contiguous(memory_format=memory_format)
    last = inputs[0].to(memory_format=memory_format)
    if last.dim() == 4:  # torch's own 1 x 1 x 1 convolution loses the format
        assert model.layer(last).is_contiguous(memory_format=memory_format)
    output, gradients = step(model, (last,))
    plain_output, plain_gradients = step(case.factorized(), inputs)
    torch.testing.assert_close(output, plain_output, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients, plain_gradients, rtol=1e-3, atol=1e-4)
    tk.densify_(model)
    assert model.layer.weight.is_contiguous(memory_format=memory_format)
    assert not model.layer.weight.is_contiguous()


# ---- modules as modules ----------------------------------------------------------------------------


@every_case
def test_activation_checkpointing_has_the_same_gradients(case: Case) -> None:
    model, inputs = case.factorized(), case.example()
    plain = step(model, inputs)
    runs = []

    class Recomputed(Around):
        def forward(self, *inputs: Tensor) -> Tensor:
            runs.append(1)
            return checkpoint(super().forward, *inputs, use_reentrant=False)

    again = Recomputed(model.layer, lambda *a: runs.append(1) or case.call(*a), case.width)
    again.head = model.head
    torch.testing.assert_close(step(again, inputs), plain)
    assert len(runs) == 3  # once, inside once, and inside again for the backward pass


@every_case
def test_a_deep_copy_is_independent(case: Case) -> None:
    model, inputs = case.factorized(), case.example()
    before = model(*inputs).detach()
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(*inputs), before)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1.0)
    assert not torch.allclose(twin(*inputs), before)
    torch.testing.assert_close(model(*inputs), before, rtol=0, atol=0)
    tk.densify_(twin)
    assert tk.structure_of(twin).is_dense
    assert not tk.structure_of(model).is_dense


@every_case
def test_state_dict_round_trip(case: Case) -> None:
    model, other, inputs = case.factorized(seed=0), case.factorized(seed=1), case.example()
    assert not torch.allclose(model(*inputs), other(*inputs))
    other.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(other(*inputs), model(*inputs), rtol=0, atol=0)
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in other.parameters()}


@every_case
def test_what_is_not_factorized_stays_the_same_parameters(case: Case) -> None:
    dense = case.build()
    dense.layer.eval()
    kept = {id(p): name for name, p in dense.named_parameters() if "bias" in name or "head" in name}
    bias = getattr(dense.layer, "bias", None)
    case.factorize_(dense)
    assert isinstance(dense.layer, Factorized)
    assert not dense.layer.training
    assert dense.training
    assert not any(module.training for module in dense.layer.modules())
    assert set(kept) <= {id(p) for p in dense.parameters()}, "a bias was replaced"
    if isinstance(bias, nn.Parameter):
        assert dense.layer.bias is bias
    tk.densify_(dense)
    assert kept == {id(p): name for name, p in dense.named_parameters() if id(p) in kept}
    assert not any(module.training for module in dense.layer.modules())


@every_case
def test_frozen_stays_frozen(case: Case) -> None:
    model = case.build()
    for name, parameter in model.layer.named_parameters():
        parameter.requires_grad_("bias" in name)
    case.factorize_(model)  # with force=True
    assert not any(p.requires_grad for p in model.layer.factor_parameters())
    assert all(p.requires_grad for name, p in model.layer.named_parameters() if "bias" in name)
    tk.densify_(model)
    for name, parameter in model.layer.named_parameters():
        assert parameter.requires_grad == ("bias" in name), name


def test_an_attention_half_frozen_stays_half_frozen() -> None:
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    model[0].out_proj.weight.requires_grad_(False)
    tk.factorize_(model, 0.5, where="0")
    learned = {name for name, p in model[0].named_parameters() if p.requires_grad}
    assert {name for name in learned if name.endswith("weight")} == {
        f"{projection}_proj.{factor}.weight" for projection in "qkv" for factor in "uv"
    }
    tk.densify_(model)
    assert model[0].in_proj_weight.requires_grad
    assert not model[0].out_proj.weight.requires_grad


@every_case
def test_hooks_move_along_and_their_handles_still_work(case: Case) -> None:
    model, inputs = case.build(), case.example()
    calls: list[str] = []
    layer = model.layer
    handles = [
        layer.register_forward_pre_hook(lambda module, args: calls.append("pre")),
        layer.register_forward_pre_hook(lambda m, args, kw: calls.append("pre kw"), with_kwargs=True),
        layer.register_forward_hook(lambda module, args, output: calls.append("forward")),
        layer.register_forward_hook(lambda m, a, kw, output: calls.append("kw"), with_kwargs=True),
        layer.register_full_backward_hook(lambda module, grad_in, grad_out: calls.append("backward")),
        layer.register_full_backward_pre_hook(lambda module, grad_out: calls.append("backward pre")),
    ]
    wanted = ["pre", "pre kw", "forward", "kw", "backward pre", "backward"]

    def run() -> list[str]:
        calls.clear()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")
            step(model, inputs)
        return calls

    assert run() == wanted
    case.factorize_(model)
    assert run() == wanted
    handles[0].remove()
    handles[4].remove()
    assert run() == [call for call in wanted if call not in ("pre", "backward")]
    tk.densify_(model)
    assert run() == [call for call in wanted if call not in ("pre", "backward")]
    for handle in handles:
        handle.remove()
    assert run() == []


@every_case
def test_made_in_inference_mode_it_can_learn(case: Case) -> None:
    model = case.build()
    with torch.inference_mode():
        case.factorize_(model)
    _, gradients = step(model, case.example())
    assert all(gradient.isfinite().all() for gradient in gradients.values())
    with torch.inference_mode():
        tk.densify_(model)
    step(model, case.example())


def test_a_computed_bias_and_an_eight_bit_weight_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    prune.l1_unstructured(model[0], "bias", 2)
    model[1].weight = nn.Parameter(model[1].weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    prune.l1_unstructured(model[2], "in_proj_bias", 2)
    report = tk.factorize_(model, 0.5, force=True)
    assert [layer.name for layer in report.factorized] == ["3"]
    assert [layer.reason for layer in report.left_dense] == [
        "its bias is computed from other parameters (pruning?); make it plain first",
        "its weight is not a plain float tensor (torch.float8_e4m3fn: quantized?)",
        "its in_proj_bias is computed from other parameters (pruning?); make it plain first",
    ]


# ---- the meta device -----------------------------------------------------------------------------------


@every_case
def test_on_meta_shapes_are_enough(case: Case, tmp_path: Path) -> None:
    model, inputs = case.factorized(), case.example()
    tk.save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        hollow = case.build()
    assert tk.choose(hollow, 0.5, "layer", scheme=case.scheme, force=True) == tk.structure_of(model)
    report = case.factorize_(hollow)
    assert report.structure == tk.structure_of(model)
    assert report.layers[0].error is None
    assert {name: (p.shape, p.device.type) for name, p in hollow.named_parameters()} == {
        name: (p.shape, "meta") for name, p in model.named_parameters()
    }
    tk.load(tmp_path / "model.safetensors", hollow)
    torch.testing.assert_close(hollow(*inputs), model(*inputs), rtol=0, atol=0)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in hollow.parameters())


@every_case
def test_on_meta_a_structure_is_applied_and_taken_back(case: Case, tmp_path: Path) -> None:
    model, inputs = case.factorized(), case.example()
    tk.save(model, tmp_path / "model.safetensors")
    with torch.device("meta"):
        hollow = case.build()
    dense_shapes = {name: p.shape for name, p in hollow.named_parameters()}
    assert tk.apply_(hollow, tk.structure_of(model)) == {}
    tk.densify_(hollow)
    assert {name: p.shape for name, p in hollow.named_parameters()} == dense_shapes
    assert {p.device.type for p in hollow.parameters()} == {"meta"}
    tk.load(tmp_path / "model.safetensors", hollow)
    torch.testing.assert_close(hollow(*inputs), model(*inputs), rtol=0, atol=0)


@pytest.mark.parametrize("rank", ["stable", "evbmf", tk.ranks.Energy(0.9), tk.ranks.Budget(params=0.9)])
@every_case
def test_on_meta_a_rule_that_needs_values_says_so(case: Case, rank: Any) -> None:
    with torch.device("meta"):
        hollow = case.build()
    before = list(hollow.modules())
    scheme = None if isinstance(rank, tk.ranks.Budget) else case.scheme
    with pytest.raises(LayerError, match="'layer' is on the meta device and has no values to decompose"):
        tk.factorize_(hollow, rank, "layer", scheme=scheme)
    assert list(hollow.modules()) == before


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 10)
        self.decoder = nn.Linear(10, 20, bias=False)
        self.decoder.weight = self.table.weight
        self.register_buffer("scale", torch.ones(20), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        return self.decoder(self.table(words)) * self.scale


@pytest.mark.parametrize("low_rank", [True, False])
def test_on_meta_tied_weights_are_loaded_tied(tmp_path: Path, low_rank: bool) -> None:
    model = Tied()
    if low_rank:
        tk.factorize_(model, 0.5, where=["table", "decoder"])
    tk.save(model, tmp_path / "tied.safetensors")
    with torch.device("meta"):
        hollow = Tied()
    with pytest.warns(TakifuguWarning, match="buffer 'scale' is not kept in files"):
        tk.load(tmp_path / "tied.safetensors", hollow)
    assert tk.structure_of(hollow) == tk.structure_of(model)
    assert len(list(hollow.parameters())) == len(list(model.parameters()))
    hollow.scale = torch.ones(20)
    words = torch.arange(6)
    torch.testing.assert_close(hollow(words), model(words), rtol=0, atol=0)


def test_ties_that_cannot_be_are_refused() -> None:
    model = nn.ModuleList(
        [nn.Linear(8, 8), nn.Linear(8, 6), nn.LSTM(8, 8), nn.LSTM(8, 8), nn.Conv1d(8, 8, 1)]
    )
    structure, before = tk.choose(model, 2, where="*"), list(model.modules())
    for leader, follower in (("0", "1"), ("2", "3"), ("0", "4")):
        tied = tk.Structure((structure[leader], replace(structure[follower], tie=leader)))
        with pytest.raises(StructureError, match=f"'{follower}' cannot share the factors of '{leader}'"):
            tk.apply_(model, tied)
    assert list(model.modules()) == before


# ---- wrappers, and reading the product ------------------------------------------------------------------


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DataParallel": nn.DataParallel,
    "OptimizedModule": torch.compile,
}


@pytest.mark.parametrize("kind", WRAPPERS)
def test_a_wrapped_model_is_refused_and_told_how(kind: str, tmp_path: Path) -> None:
    wrapped = nn.Sequential(WRAPPERS[kind](nn.Sequential(nn.Linear(8, 8))))
    for call in (
        lambda: tk.factorize_(wrapped, 0.5),
        lambda: tk.choose(wrapped, 0.5),
        lambda: tk.densify_(wrapped),
        lambda: tk.save(wrapped, tmp_path / "no.safetensors"),
    ):
        with pytest.raises(UsageError, match=rf"wrapped in {kind}, .*use model\.0\.(module|_orig_mod), and"):
            call()
    assert not list(tmp_path.iterdir())


def test_a_forward_of_its_own_is_left_alone() -> None:
    class Standardized(nn.Conv2d):
        def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return super()._conv_forward(input, weight - weight.mean(), bias)

    model = nn.Sequential(Standardized(8, 8, 3), nn.Linear(8, 8), nn.Linear(8, 64))
    model[1].forward = lambda x: x * 7
    report = tk.factorize_(model, 0.5, where="*")
    assert [layer.name for layer in report.factorized] == ["2"]
    assert [layer.reason for layer in report.left_dense] == [
        "Standardized has a forward of its own",
        "Linear has a forward of its own",
    ]


WITH_WEIGHT = [
    case for case in CASES.values() if isinstance(getattr(case.build().layer, "weight", None), Tensor)
]


@pytest.mark.parametrize("case", WITH_WEIGHT, ids=[case.name for case in WITH_WEIGHT])
def test_the_weight_can_be_read_but_not_changed(case: Case) -> None:
    dense, model = case.build(), case.factorized(rank=1.0)
    weight = model.layer.weight
    assert isinstance(weight, Tensor)
    for look in ("dtype", "device", "shape", "ndim", "layout", "requires_grad"):
        assert getattr(weight, look) == getattr(dense.layer.weight, look)
    assert (weight.size(0), weight.dim(), weight.numel()) == (
        dense.layer.weight.size(0),
        dense.layer.weight.dim(),
        dense.layer.weight.numel(),
    )
    torch.testing.assert_close(weight.detach(), dense.layer.weight.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(weight * 2, 2 * dense.layer.weight, rtol=1e-4, atol=1e-5)
    factors = model.layer.factor_parameters()
    assert all(g.norm() > 0 for g in torch.autograd.grad(weight.square().sum(), factors))
    changes = (
        lambda: weight.mul_(2),
        lambda: nn.init.normal_(weight),
        lambda: weight.requires_grad_(False),
        lambda: setattr(weight, "requires_grad", False),
        lambda: setattr(weight, "data", dense.layer.weight),
        lambda: weight.__setitem__(0, 0.0),
    )
    for change in changes:
        with pytest.raises(LayerError, match=r"product of its factors and cannot be changed; change the fac"):
            change()
    with torch.no_grad():
        factors[0].mul_(2)
    torch.testing.assert_close(weight.detach(), 2 * dense.layer.weight.detach(), rtol=1e-4, atol=1e-5)


def test_looking_at_the_weight_computes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = only("linear").factorized()
    monkeypatch.setattr(type(model.layer), "dense_weights", lambda self: pytest.fail("formed the product"))
    assert model.layer.weight.dtype == torch.float32
    assert model.layer.weight.shape == (10, 12)
    assert model.layer.weight.device.type == "cpu"


def test_a_convolution_can_be_read_like_one() -> None:
    for name, case in CASES.items():
        if not case.kind.startswith("conv"):
            continue
        dense, layer = case.build().layer, case.factorized().layer
        for option in (
            "in_channels",
            "out_channels",
            "kernel_size",
            "stride",
            "padding",
            "dilation",
            "groups",
        ):
            assert getattr(layer, option) == getattr(dense, option), (name, option)


# ---- torch's transformers --------------------------------------------------------------------------------

WIDTH = 16


def padded(batch: int = 3, length: int = 6) -> tuple[Tensor, Tensor]:
    """Sequences of unequal lengths: values, and True where there is only padding."""
    lengths = torch.tensor([length, length - 2, length - 3])[:batch]
    return torch.randn(batch, length, WIDTH), torch.arange(length)[None] >= lengths[:, None]


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 32, dropout=0.0, batch_first=True, **options)
    model = nn.TransformerEncoder(layer, 3)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.xavier_uniform_(parameter)
    return model


WHERE = {
    "attention and feed-forward": ["layers.[12].self_attn", "layers.[12].linear?"],
    "feed-forward only": ["layers.[12].linear?"],
    "attention only": ["layers.[12].self_attn"],
    "half a feed-forward": ["layers.2.linear2"],
    "everything": ["layers.*"],
}


def same_where_it_counts(output: Tensor, wanted: Tensor, padding: Tensor) -> None:
    """torch's fast path leaves zeros where there is padding, the others something; neither counts."""
    torch.testing.assert_close(output[~padding], wanted[~padding], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("where", WHERE.values(), ids=WHERE)
def test_an_encoder_partly_factorized_takes_padded_batches(where: list[str], norm_first: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # norm_first: torch says at once that it has no nested tensors
        model = encoder(norm_first=norm_first)
    fast_before = model.use_nested_tensor, [layer.activation_relu_or_gelu for layer in model.layers]
    tk.factorize_(model, 0.5, where=where, force=True)
    x, padding = padded()
    dense = copy.deepcopy(model)
    tk.densify_(dense)
    assert (dense.use_nested_tensor, [layer.activation_relu_or_gelu for layer in dense.layers]) == fast_before
    assert not any(name.startswith("_takifugu") for m in dense.modules() for name in vars(m))

    for mode in (True, False):
        model.train(mode)
        dense.train(mode)
        wanted = dense(x, src_key_padding_mask=padding)
        same_where_it_counts(model(x, src_key_padding_mask=padding), wanted, padding)
        with torch.inference_mode(), torch.no_grad():
            fast = dense(x, src_key_padding_mask=padding)
            same_where_it_counts(model(x, src_key_padding_mask=padding), fast, padding)
            same_where_it_counts(fast, wanted, padding)
            torch.testing.assert_close(model(x), dense(x), rtol=1e-4, atol=1e-5)
            causal = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            torch.testing.assert_close(
                model(x, causal, is_causal=True), dense(x, causal, is_causal=True), rtol=1e-4, atol=1e-5
            )
    # The dense layers of a mixed encoder keep their fast path.
    declined = [layer.activation_relu_or_gelu == 0 for layer in model.layers]
    has_factors = [any(isinstance(m, Factorized) for m in layer.modules()) for layer in model.layers]
    assert declined == has_factors


def test_a_second_change_keeps_the_fast_paths_memory() -> None:
    model = encoder()
    tk.factorize_(model, 0.5, where="layers.1.linear1", force=True)
    tk.factorize_(model, 0.5, where="layers.2.linear1", force=True)
    tk.apply_(model, tk.Structure())
    assert model.use_nested_tensor
    assert [layer.activation_relu_or_gelu for layer in model.layers] == [1, 1, 1]


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("batch_first", [True, False])
def test_the_whole_transformer(batch_first: bool, mode: bool) -> None:
    model = nn.Transformer(WIDTH, 4, 2, 2, 32, dropout=0.0, batch_first=batch_first).train(mode)
    report = tk.factorize_(model, 0.5, where=lambda name, _: ".layers.1." in name, force=True)
    assert {layer.kind for layer in report.factorized} == {"attention", "linear"}
    assert len(report.factorized) == 2 * 2 + 3  # an encoder and a decoder layer: feed-forward, attentions
    dense = copy.deepcopy(model)
    tk.densify_(dense)
    source, padding = padded()
    target, _ = padded()
    masks = {
        "tgt_mask": nn.Transformer.generate_square_subsequent_mask(target.shape[1]),
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }
    if not batch_first:
        source, target = source.transpose(0, 1), target.transpose(0, 1)
    torch.testing.assert_close(
        model(source, target, **_additive(masks)),
        dense(source, target, **_additive(masks)),
        rtol=1e-4,
        atol=1e-5,
    )
    with torch.no_grad():
        torch.testing.assert_close(
            model(source, target, **masks), dense(source, target, **masks), rtol=1e-4, atol=1e-5
        )


def _additive(masks: dict[str, Any]) -> dict[str, Any]:
    return {
        name: torch.zeros(m.shape).masked_fill_(m, float("-inf"))
        if isinstance(m, Tensor) and m.dtype == torch.bool
        else m
        for name, m in masks.items()
    }


def test_a_decoder() -> None:
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 4, 32, batch_first=True), 2).eval()
    memory, padding = padded()
    target, _ = padded()
    tk.factorize_(model, 1.0, force=True)
    dense = copy.deepcopy(model)
    tk.densify_(dense)
    torch.testing.assert_close(
        model(target, memory, memory_key_padding_mask=padding),
        dense(target, memory, memory_key_padding_mask=padding),
        rtol=1e-4,
        atol=1e-5,
    )


def test_a_nested_tensor_is_refused_clearly() -> None:
    model = replace(only("attention"), variant="").factorized()
    nested = torch.nested.nested_tensor([torch.randn(3, 8), torch.randn(2, 8)])
    with pytest.raises(LayerError, match="does not take nested tensors; pass padded tensors with a mask"):
        model.layer(nested, nested, nested)
