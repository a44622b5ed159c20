"""Parameters of trainable classes, trained beside their inner tensors as separate parameters: the same numbers."""

import copy
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from subclasses import DispatchError, SpecError, TensorSubclass, arithmetic, inner, static
from subclasses._torch import hooks_of
from subclasses.layout import cotangent_layout
from tests.doors import COMPILED, DOORS
from tests.subclasses.dispatch.training import innermost, saved
from tests.subclasses.subjects import LowRank, Pair, Scaled, assert_same, declare
from tests.tables import raising

aten = torch.ops.aten
two_ways = pytest.mark.parametrize("door", ["eager", "desugar"])


# Integers that stay, and a scale that is trained.
Quantized = declare(
    __module__=__name__,
    name="Quantized",
    keywords={"size_from": "q", "dtype_from": "scale", "fallback": "materialize", "trainable": True},
    q=inner(dtype=torch.int8),
    scale=inner(),
    materialize=lambda self: self.q.to(self.scale.dtype) * self.scale,
)
# One rule above autograd and no fallback; its gradient is a cotangent without being converted.
Ruled = declare(
    __module__=__name__,
    name="Ruled",
    keywords={"trainable": True},
    data_=inner(),
    offset=inner(optional=True),
    power=static(default=1),
    rules={F.linear: lambda func, x, w, bias=None: func(x, w.unwrap("data_") ** w.power, bias)},
)


def randn(*size):
    return torch.randn(*size, dtype=torch.float64)


MAKERS = {
    "low rank": lambda: (LowRank, randn(4, 2), randn(2, 4)),
    "quantized": lambda: (Quantized, torch.randint(-8, 8, (4, 4), dtype=torch.int8), randn(4, 1)),
    "ruled": lambda: (Ruled, randn(4, 4)),
    "pair": lambda: (Pair, randn(4, 4), randn(4, 4)),
}


class Net(nn.Module):
    """A layer for each kind of weight: Parameters of the classes, or their inner tensors as parameters."""

    def __init__(self, weights, wraps):
        super().__init__()
        self.kinds, self.wraps, self.plain = weights, wraps, nn.Linear(4, 4, dtype=torch.float64)
        own = [(cls, [t.clone() for t in inners]) for cls, *inners in weights]
        leaves = [cls(*inners) for cls, inners in own] if wraps else [t for _, inners in own for t in inners]
        self.weights = nn.ParameterList(nn.Parameter(t) for t in leaves if t.is_floating_point())

    def forward(self, x):
        rest = iter(self.weights)
        x = self.plain(x)
        for cls, *inners in self.kinds:
            w = (
                next(rest)
                if self.wraps
                else cls(*(next(rest) if t.is_floating_point() else t for t in inners))
            )
            if cls is Pair:  # with a plain operand, its op would give that a Pair as gradient
                w = torch.sub(*(w * 2).unwrap())
            x = x + F.linear(x, w).tanh()
        return x.square().mean()

    def inners(self):
        return [t for w in self.weights for t in innermost(w) if t.is_floating_point()]


def make_nets(kinds):
    weights = [MAKERS[k]() for k in kinds]
    wrapped, plain = (Net(weights, wraps) for wraps in (True, False))
    plain.plain.load_state_dict(wrapped.plain.state_dict())
    return wrapped, plain


def check_same(wrapped, plain):
    torch.testing.assert_close(wrapped.inners(), plain.inners(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(wrapped.plain.state_dict(), plain.plain.state_dict(), rtol=1e-9, atol=1e-12)


def train(net, optimizer, steps=3, run=None, clip=None):
    run = net if run is None else run
    for i in range(steps):
        for j in range(2):  # gradients accumulate
            run(torch.arange(8, dtype=torch.float64).view(2, 4) / (i + j + 1)).backward()
        if clip is not None:
            clip(net)
        optimizer.step()
        optimizer.zero_grad(set_to_none=i % 2 == 0)


KINDS = [*([k] for k in MAKERS), list(MAKERS), [*MAKERS, "low rank"]]
IDS = [" ".join(k) for k in KINDS]

OPTIMIZERS = {
    "SGD": lambda p, **how: torch.optim.SGD(p, lr=0.1, **how),
    "SGD with momentum": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1, **how),
    "SGD with Nesterov": lambda p, **how: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **how),
    "Adam": lambda p, **how: torch.optim.Adam(p, lr=0.1, weight_decay=0.1, **how),
    "AMSGrad": lambda p, **how: torch.optim.Adam(p, lr=0.1, amsgrad=True, **how),
    "AdamW": lambda p, **how: torch.optim.AdamW(p, lr=0.1, weight_decay=0.1, **how),
    "Adagrad": lambda p, **how: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1, **how),
}
# Tried on all kinds at once.
MORE_OPTIMIZERS = {
    "RMSprop": lambda p, **how: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True, **how),
    "Adadelta": lambda p, **how: torch.optim.Adadelta(p, lr=0.1, **how),
    "Adamax": lambda p, **how: torch.optim.Adamax(p, lr=0.1, **how),
    "NAdam": lambda p, **how: torch.optim.NAdam(p, lr=0.1, **how),
    "RAdam": lambda p, **how: torch.optim.RAdam(p, lr=0.1, **how),
    "ASGD": lambda p, **how: torch.optim.ASGD(p, lr=0.1, **how),
}


def check_training(kinds, optimizer, clip=None, compile_=None):
    nets = make_nets(kinds)
    for net in nets:
        run = compile_(net) if compile_ and net is nets[0] else None
        train(net, optimizer([p for p in net.parameters() if p.requires_grad]), run=run, clip=clip)
    check_same(*nets)


# ---- optimizers ----------------------------------------------------------------------------------------------


@pytest.mark.sweep(16)
@pytest.mark.parametrize("how", [{}, {"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_an_optimizer_updates_the_inner_tensors_as_parameters(kinds, name, how):
    check_training(kinds, lambda p: OPTIMIZERS[name](p, **how))


@pytest.mark.parametrize("foreach", [False, True], ids=["single", "foreach"])
@pytest.mark.parametrize("name", MORE_OPTIMIZERS)
def test_more_optimizers(name, foreach):
    check_training(list(MAKERS), lambda p: MORE_OPTIMIZERS[name](p, foreach=foreach))


def params(net):
    return [p for p in net.parameters() if p.requires_grad]


CLIPS = {
    "norm": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05),
    "norm of order 1": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, norm_type=1),
    "largest": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, norm_type=float("inf")),
    "norm, foreach": lambda net: nn.utils.clip_grad_norm_(params(net), 0.05, foreach=True),
    "value": lambda net: nn.utils.clip_grad_value_(params(net), 0.01),
    "value, foreach": lambda net: nn.utils.clip_grad_value_(params(net), 0.01, foreach=True),
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_clipping(kinds, clip):
    nets, x = make_nets(kinds), randn(2, 4)
    for net in nets:
        net(x).backward()
    torch.testing.assert_close(*map(CLIPS[clip], nets))
    check_training(kinds, OPTIMIZERS["SGD"], clip=CLIPS[clip])


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("function", [torch.linalg.vector_norm, torch.norm, aten.linalg_vector_norm.default])
def test_clipping_does_not_ask_the_rule_for_the_norm_of_values(function, foreach):
    norm = lambda func, x, *args, **kwargs: func(x.left @ x.right, *args, **kwargs)  # noqa: E731
    w = make_parameter(declare(LowRank, keywords={"trainable": True}, rules={function: norm}))
    parts = check_gradient(w)
    norms = [nn.utils.clip_grad_norm_(p, 0.05, foreach=foreach) for p in ([w], parts)]
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(w.grad.left, parts[0].grad)
    value = torch.linalg.vector_norm(w) if function is not torch.norm else torch.norm(w)
    torch.testing.assert_close(value, torch.linalg.vector_norm(parts[0] @ parts[1]))


def no_norm(func, *args, **kwargs):
    raise DispatchError("no norm")


Refusing = declare(LowRank, keywords={"trainable": True})
Refusing.Cotangent.implements(torch.linalg.vector_norm, torch._foreach_norm)(no_norm)


def clip_gradient_of(cls, foreach):
    w = make_parameter(cls)
    check_gradient(w)
    nn.utils.clip_grad_norm_([w], 0.05, foreach=foreach)


test_a_class_may_say_what_the_norm_of_a_gradient_is = raising(
    [
        (lambda cls=cls, foreach=foreach: clip_gradient_of(cls, foreach), "no norm")
        for cls in (Refusing, declare(Refusing))
        for foreach in (False, True)
    ]
)


def scale(net, fused):
    optimizer = torch.optim.AdamW(params(net), lr=0.1, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for factor in (1, float("inf"), 1):  # the step with infinite gradients is skipped
        optimizer.zero_grad()
        scaler.scale(net(torch.ones(2, 4, dtype=torch.float64)) * factor).backward()
        if not fused:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params(net), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4
    return net


AVERAGES = {
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema one by one": {"avg_fn": get_ema_avg_fn(0.9)},
    "default": {},
}


def average(net, how):
    optimizer = torch.optim.SGD(params(net), lr=0.5)
    model = AveragedModel(net, **AVERAGES[how])
    for _ in range(3):
        train(net, optimizer, 1)
        model.update_parameters(net)
    assert model.module(randn(2, 4)).requires_grad
    return model.module


def average_by_hand(net):
    state = {k: v.clone() for k, v in net.state_dict().items()}
    train(net, torch.optim.SGD(params(net), lr=0.5))
    for k, v in net.state_dict().items():
        state[k].mul_(0.9).add_(v, alpha=0.1)
    net.load_state_dict(state)
    return net


def train_with_saved_states(net):
    state = {}
    for _ in range(2):
        optimizer = torch.optim.AdamW(params(net), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if state:
            optimizer.load_state_dict(saved(state))
        train(net, optimizer, 2)
        schedule.step()
        state = optimizer.state_dict()
    assert not net.wraps or type(state["state"][2]["exp_avg"]) is LowRank.Cotangent  # after the plain layer
    return net


# An action on a model, and the kinds of weights for it.
DONE = {
    "a gradient scaler": (lambda net: scale(net, False), KINDS),
    "a gradient scaler, fused": (lambda net: scale(net, True), KINDS),
    "ema": (lambda net: average(net, "ema"), KINDS),
    "swa": (lambda net: average(net, "swa"), KINDS),
    "ema one by one": (lambda net: average(net, "ema one by one"), [["pair"]]),
    "default": (lambda net: average(net, "default"), [["pair"]]),
    "an average that is written by hand": (average_by_hand, [["low rank", "ruled"]]),
    "a schedule and states that are saved and loaded": (train_with_saved_states, [list(MAKERS)]),
}


@pytest.mark.parametrize(("done", "kinds"), [(name, kinds) for name in DONE for kinds in DONE[name][1]])
def test_what_is_done_with_a_model(done, kinds):
    check_same(*map(DONE[done][0], make_nets(kinds)))


@pytest.mark.parametrize("average", ["ema one by one", "default"])
def test_an_average_of_values_is_refused(average):
    """0.9 * W + 0.1 * V is the mean of the matrices, and has another rank."""
    net = Net([MAKERS["low rank"]()], True)
    model = AveragedModel(net, **AVERAGES[average])
    model.update_parameters(net)
    before = model.module.inners()
    with pytest.raises(DispatchError, match="pass multi_avg_fn=get_ema"):
        model.update_parameters(net)
    torch.testing.assert_close(model.module.inners(), before, rtol=0, atol=0)


@pytest.mark.sweep(48)
@pytest.mark.parametrize("door", COMPILED)
@pytest.mark.parametrize("kinds", KINDS, ids=IDS)
def test_a_compiled_forward(kinds, door):
    check_training(kinds, OPTIMIZERS["AdamW"], clip=CLIPS["norm"], compile_=COMPILED[door])


# ---- the gradient --------------------------------------------------------------------------------------------

X = torch.linspace(-1, 1, 8, dtype=torch.float64).view(2, 4)


def make_parameter(cls=LowRank):
    return nn.Parameter(cls(randn(4, 2), randn(2, 4)))


def check_gradient(p):
    """Checks that a materializing op gives the cotangent of each factor; returns the plain factors."""
    p.grad = None
    F.linear(X.to(p.dtype), p).sum().backward()
    left, right = (t.clone().requires_grad_() for t in (p.left, p.right))
    F.linear(X.to(p.dtype), left @ right).sum().backward()
    assert type(p.grad) is type(p).Cotangent and p.grad._layout is cotangent_layout(p._layout)
    torch.testing.assert_close([p.grad.left, p.grad.right], [left.grad, right.grad])
    return left, right


COPIES = {
    "itself": lambda p: p,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "an assigned inner tensor": lambda p: (setattr(p, "right", randn(2, 4)), p)[1],
    "a parameter of its data": lambda p: nn.Parameter(p.data),
    "frozen and thawed": lambda p: p.requires_grad_(False).requires_grad_(),
    "thawed": lambda p: nn.Parameter(p.detach(), requires_grad=False).requires_grad_(),
    "a frozen copy, thawed": lambda p: copy.deepcopy(p.requires_grad_(False)).requires_grad_(),
    "file": saved,
}


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_converts_its_gradients(way):
    p = COPIES[way](make_parameter())
    assert isinstance(p, nn.Parameter) and len(hooks_of(p)) == 1
    check_gradient(p)
    p.grad = None
    F.linear(X, p).sum().backward()
    p.unwrap("left").sum().backward()  # a cotangent is added to an earlier plain gradient
    F.linear(X, p).sum().backward()
    torch.testing.assert_close(p.grad.left, 2 * (X @ p.right.T).sum(0).expand(4, 2) + 1)


def module_with(w):
    module = nn.Module()
    module.w = w
    return module


def test_a_module_that_is_moved_and_loaded():
    module = module_with(make_parameter())
    before = module.w
    module.to(torch.float32)
    assert module.w is before and module.w.dtype == torch.float32
    check_gradient(module.w)
    seen = []
    module.w.register_hook(lambda grad: seen.append(type(grad)))  # in the same list of hooks
    check_gradient(module.w)
    assert seen == [LowRank.Cotangent]
    other = module_with(make_parameter()).to(torch.float32)
    for assign in (False, True):
        other.load_state_dict(module.state_dict(), assign=assign)
        assert torch.equal(other.w.left, module.w.left) and isinstance(other.w, nn.Parameter)
        check_gradient(other.w)
    check_gradient(copy.deepcopy(module).w)


def test_a_module_that_is_frozen_emptied_and_called_with_other_weights():
    layer = nn.Linear(4, 4, dtype=torch.float64)
    layer.weight = make_parameter()
    layer.requires_grad_(False).requires_grad_()
    check_gradient(layer.weight)
    other = {"weight": layer.weight.detach().clone().requires_grad_()}
    torch.testing.assert_close(torch.func.functional_call(layer, other, (X,)), layer(X))
    layer.to_empty(device="cpu")
    assert isinstance(layer.weight, nn.Parameter) and not layer.weight._layout.cotangent
    layer.load_state_dict({"weight": make_parameter().detach(), "bias": layer.bias.detach()})
    check_gradient(layer.weight)


@pytest.mark.usefixtures("without_garbage_collection")
def test_the_attributes_of_a_parameter_are_not_kept_by_a_cycle():
    p = make_parameter()
    held = weakref.ref(p.left)
    check_gradient(p)
    del p
    assert held() is None


def test_a_gradient_of_a_gradient_is_that_of_the_value():
    p = make_parameter()
    (grad,) = torch.autograd.grad((p * p).sum(), p, create_graph=True)
    assert type(grad) is Tensor
    (grad * grad).sum().backward()
    left, right = (t.clone().requires_grad_() for t in (p.left, p.right))
    (4 * (left @ right) ** 2).sum().backward()
    torch.testing.assert_close([p.grad.left, p.grad.right], [left.grad, right.grad])


# ---- arithmetic of inner tensors, and other ops --------------------------------------------------------------


def test_values_keep_their_meaning():
    w = LowRank(randn(4, 2), randn(2, 4))
    for doubled in (w * 2, nn.Parameter(w) * 2, *torch._foreach_mul([w], 2)):
        torch.testing.assert_close(doubled, w.materialize() * 2)
    assert type(torch.zeros_like(w)) is Tensor


def gradient():
    p = make_parameter()
    check_gradient(p)
    return p.grad


FACTOR = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
MIXED = r"cotangents of a LowRank are added|Cotangent beside a LowRank"
test_what_is_no_arithmetic_of_inner_tensors = raising(
    {
        "a value": (lambda: LowRank(randn(4, 2), randn(2, 4)).mul_(2), "writes to a LowRank"),
        "values": (
            lambda: torch._foreach_mul_([LowRank(randn(4, 2), randn(2, 4))], 2),
            "writes to a LowRank",
        ),
        # Writes that autograd records.
        "by a tensor with a gradient": (
            lambda: make_parameter().detach().mul_(FACTOR),
            "writes to a LowRank",
        ),
        "a result": (lambda: make_parameter().clone().mul_(2), "writes to a LowRank"),
        "a gradient times a tensor": (lambda: gradient() * randn(4, 4), MIXED),
        "a gradient and a value": (lambda: gradient() + LowRank(randn(4, 2), randn(2, 4)), MIXED),
        "gradients times tensors": (lambda: torch._foreach_mul([gradient()], [X]), MIXED),
    }
)


def test_points_and_cotangents():
    p = make_parameter()
    check_gradient(p)
    g = p.grad
    with torch.no_grad():
        moved, tangent = p - g * 0.1, g + p
        torch.testing.assert_close(moved.left, p.left - g.left * 0.1)
        assert not moved._layout.cotangent and tangent._layout.cotangent
        (listed,) = aten._foreach_sub.List(
            [p], [g]
        )  # torch's parser of arguments takes [g] for a list of numbers
        assert not listed._layout.cotangent
        assert torch.zeros_like(p)._layout.cotangent and (g > 0).left.dtype == torch.bool
        masked = torch.where(g.isnan(), torch.zeros_like(g), g)
        torch.testing.assert_close(masked.left, g.left)
        p.detach().clone().mul_(2)
        p.copy_(moved)
    torch.testing.assert_close(p.left, moved.left)
    norms = torch.linalg.vector_norm(torch.stack([g.left.norm(), g.right.norm()]))
    torch.testing.assert_close(g.norm(), norms)


def test_a_later_write_is_noticed():
    p = make_parameter()
    out = (p.unwrap("left") ** 2).sum()
    with torch.no_grad():
        torch._foreach_mul_([p], 2)
    with pytest.raises(RuntimeError, match="modified in"):
        out.backward()


def test_lists_with_lists_of_numbers():
    ps = [
        nn.Parameter(cls(*inners))
        for cls, *inners in (MAKERS["low rank"](), MAKERS["pair"](), MAKERS["ruled"]())
    ]
    ps.insert(1, nn.Parameter(randn(3)))
    scalars = [1.0, 2.0, 3.0, 4.0]

    def first(p):
        return p.detach().unwrap()[0] if isinstance(p, TensorSubclass) else p.detach()

    expected = [first(p) * s + s for p, s in zip(ps, scalars, strict=True)]
    with torch.no_grad():
        torch._foreach_mul_(ps, scalars)
        ones = [torch.ones_like(p) for p in ps]
        torch._foreach_addcmul_(ps, ones, ones, torch.tensor(scalars, dtype=torch.float64))
        torch._foreach_copy_(ps, [p.detach().clone() for p in ps])
    torch.testing.assert_close([first(p) for p in ps], expected)


# ---- declared and refused ------------------------------------------------------------------------------------


def test_the_keyword_is_inherited():
    Child, Frozen = declare(LowRank), declare(LowRank, keywords={"trainable": False})
    assert Child.__spec__.trainable and not Frozen.__spec__.trainable and Pair.__spec__.trainable
    assert "trainable=True" in repr(Child.__spec__)


test_the_keyword_is_checked = raising(
    [
        (
            lambda: step_of(make_parameter(declare(LowRank, keywords={"trainable": False}))),
            "trainable=True",
        ),
        (
            lambda: declare(keywords={"trainable": True}, q=inner(dtype=torch.int8)),
            SpecError,
            r"torch\.int8; remove trainable=True",
        ),
        (lambda: declare(keywords={"trainable": "yes"}), SpecError, "a bool as trainable="),
    ]
)


def step_of(p):
    p.grad = torch.ones(p.shape, dtype=p.dtype)
    torch.optim.SGD([p], lr=0.1).step()


@pytest.mark.sweep(18)
@pytest.mark.parametrize("optimizer", ["SGD with momentum", "AdamW"])
@pytest.mark.parametrize("how", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_with_a_parameter_that_cannot_be_updated_writes_nothing(optimizer, how, compiled):
    """A Parameter and its gradient may exist; only the step raises, and it updates no plain Parameter beside it."""
    layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weight = layers[1].weight = nn.Parameter(Scaled(torch.ones(3, 3), torch.tensor(2.0)))
    layers(torch.ones(2, 3)).sum().backward()
    assert weight.requires_grad and type(weight.grad) is Tensor and weight.grad.shape == (3, 3)
    written = [*layers[0].parameters(), weight.data_, weight.factor]
    before = [t.detach().clone() for t in written]
    state = OPTIMIZERS[optimizer](layers.parameters(), **how)
    step = torch.compile(state.step, backend="eager") if compiled else state.step
    with pytest.raises(
        DispatchError, match=r"step\(\): a Parameter is a Scaled.* requires_grad_\(False\).*call Scaled"
    ):
        step()
    assert not state.state and all(map(torch.equal, written, before))
    layers.requires_grad_(False)[0].requires_grad_()
    weight.grad = None
    step()
    assert not torch.equal(layers[0].weight, before[0])


def test_a_class_that_cannot_train_may_be_a_parameter():
    """Its weights are loaded into a module that trains, and frozen, thawed and converted there."""
    layer = nn.Linear(3, 3)
    layer.load_state_dict(
        {"weight": Scaled(torch.ones(3, 3), torch.tensor(2.0)), "bias": torch.zeros(3)}, assign=True
    )
    layer.register_parameter("other", layer.weight)
    assert type(layer.weight) is Scaled and isinstance(layer.weight, nn.Parameter)
    assert (
        not layer.requires_grad_(False).weight.requires_grad and layer.requires_grad_().weight.requires_grad
    )
    assert copy.deepcopy(layer).to(torch.float64).half().weight.dtype == torch.float16
    layer.to("cpu")
    torch.testing.assert_close(layer(torch.ones(1, 3)), torch.full((1, 3), 6.0))
    layer(torch.ones(1, 3)).sum().backward()
    with pytest.raises(DispatchError, match=r"SGD.step\(\): a Parameter is a Scaled"):
        torch.optim.SGD(layer.parameters(), lr=0.1).step()


def add(func, x, y, **kwargs):
    return type(x)(func(x.held, y.held if isinstance(y, Added) else y, **kwargs))


# A rule for values. An optimizer adds a gradient, whose inner tensors are derivatives.
Added = declare(rules={aten.add.Tensor: add})
Viewed = declare(Added, keywords={"fallback": "views"}, rules={arithmetic: add})
test_a_rule_for_values_is_not_enough = raising(
    {
        "a step": (
            lambda: step_of(nn.Parameter(Added(torch.ones(2)))),
            r"its rule is for values, not for a gradient.*trainable=True",
        ),
        "an op of a step": (
            lambda: Viewed(torch.ones(2)).lerp_(Viewed(torch.zeros(2)), 0.5),
            r"lerp_.*updates each inner tensor of a class declared with trainable=True",
        ),
        # The op refuses a leaf that is not a Parameter.
        "a leaf": (
            torch.no_grad()(
                lambda: Scaled(torch.ones(3), torch.tensor(2.0)).requires_grad_().add_(torch.ones(3))
            ),
            "writes to a Scaled",
        ),
    }
)


def test_lists_of_a_class_with_a_rule_above_autograd():
    rule = lambda func, *args, **kwargs: Above.unruled(func, *args, **kwargs)  # noqa: E731
    Above = declare(keywords={"fallback": "map"}, rules={F.linear: rule})
    one, other = Above(torch.ones(2, 3)), Above(torch.full((2, 3), 4.0))
    for result, expected in (
        (torch._foreach_add([one, other], [other, one]), [5.0, 5.0]),
        (torch._foreach_mul([one, other], [other, other]), [4.0, 16.0]),
        (torch._foreach_add([one, other], [other, one], alpha=2), [9.0, 6.0]),
        (torch._foreach_mul([one, other], 2), [2.0, 8.0]),
    ):
        for found, number in zip(result, expected, strict=True):
            assert_same(found, Above(torch.full((2, 3), number)))


def test_a_number_is_added_to_a_gradient():
    p = torch.nn.Parameter(LowRank(torch.ones(2, 1), torch.ones(1, 2)))
    (torch.ones(3, 2) @ p).sum().backward()
    for shifted in (p.grad + 1, 1 + p.grad, p.grad.add(1), p.grad - (-1)):
        assert torch.equal(shifted.left, p.grad.left + 1) and torch.equal(shifted.right, p.grad.right + 1)


STEPS = {
    "loop": lambda p: torch.optim.SGD([p], lr=0.5, foreach=False).step(),
    "foreach": lambda p: torch.optim.SGD([p], lr=0.5, foreach=True).step(),
    "adamw, foreach": lambda p: torch.optim.AdamW([p], lr=0.5, foreach=True).step(),
    "adamw, fused": lambda p: torch.optim.AdamW([p], lr=0.5, fused=True).step(),
    "by hand": lambda p: p.detach().mul_(2),
}


NOTICING = {
    "low rank": (lambda x, p: F.linear(x, p).square(), lambda: LowRank(torch.randn(4, 2), torch.randn(2, 4))),
    "mapped": (lambda x, p: (p * p).unwrap("a"), lambda: Pair(torch.randn(4), torch.randn(4))),
}


@pytest.mark.sweep(2)
@two_ways
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", NOTICING)
def test_a_step_between_forward_and_backward_is_noticed(kind, step, door):
    """The callable of a list op counts the writes to its wrappers."""
    fn, make = NOTICING[kind]
    x, parameter, call = torch.randn(3, 4, requires_grad=True), nn.Parameter(make()), DOORS[door](fn)
    first, late = call(x, parameter).sum(), call(x, parameter).sum()
    first.backward()
    with torch.no_grad():
        STEPS[step](parameter)
    with pytest.raises(RuntimeError, match="modified"):
        late.backward()


# ---- a cotangent is not a matrix ---------------------------------------------------------------------------


def factored(func, x, w):
    left, right = w.unwrap()
    return (x @ left) @ right


# Has a rule for products with it.
Factors = declare(LowRank, name="Factors", rules={torch.matmul: factored})

STATES = {
    "ones_like": torch.ones_like,
    "full_like": lambda p: p * torch.full_like(p, 2.0),
    "zeros_like": lambda p: torch.zeros_like(p) + 1,
}


@two_ways
@pytest.mark.parametrize("state", STATES)
def test_a_state_of_an_optimizer_is_no_factor_of_a_product(state, door):
    p, way = nn.Parameter(Factors(torch.randn(3, 2), torch.randn(2, 3))), DOORS[door]
    with pytest.raises(
        Exception,
        match=r"mm.default on a cotangent of Factors.*call it on p\.materialize\(\)|on a Factors\.Cotangent: PyTorch's",
    ):
        way(lambda p: torch.ones(1, 3) @ STATES[state](p))(p)
    got = way(lambda p: torch.ones(1, 3) @ torch.ones_like(p.materialize()))(p)
    torch.testing.assert_close(got, torch.full((1, 3), 3.0))
