"""The table of promises: which cases run in which context, and which oracle judges them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from subclasses._torch import fake_mode
from subclasses.testing import derive, gradients, op_infos, oracles, programs, structure
from subclasses.testing.calls import LAZY, METADATA_MUTATIONS, MUTATIONS, PAIRS, RANDOM, VIEWS, WHOLE, Case
from subclasses.testing.cases import (
    accepted,
    applicable,
    argument_cases,
    functional_cases,
    kit_cases,
    own_methods,
    plains_of,
    recorded,
    records_on,
    rules_tried,
)
from subclasses.testing.contexts import CONTEXTS, EXPORT, INDUCTOR, Setting, two, under
from subclasses.testing.errors import succeeds
from subclasses.testing.oracles import by_eager, by_reference
from subclasses.testing.programs import RETURNED, program, written_views
from subclasses.testing.report import Promise
from subclasses.testing.structure import CONVERSIONS, FILES, NUMBERS, PICKLED, READ, SHOWN
from subclasses.testing.subject import SEED, tried_alone

ALIASING = (
    "end __torch_dispatch__ with `return torch.utils._python_dispatch.return_and_correct_aliasing(func, "
    "args, kwargs, out)`"
)
_OUTSIDE = (
    "declare the outer size, dtype and device with size_from=, dtype_from= or `outer`: the result of materialize() "
    "has the same, computed from the inner tensors"
)
_REFUSE = "raise subclasses.DispatchError or NotImplementedError"
_BOTH = (
    "a rule for several values computes each inner tensor of its result from the inner tensors of all operands, in "
    "their order. It applies each argument, such as alpha=. For x + y, it computes from x.field and y.field, and "
    "not from x.field twice"
)
_DERIVATIVE = (
    "PyTorch's formula for the op is the derivative of a rule for an op of a representation: the rule must compute "
    "the op of the tensors that the values represent. PyTorch differentiates the ops of any other rule on inner "
    "tensors: it sees none where the rule calls detach(), reads .data, converts to numpy or turns gradients off. It "
    "sees none either where a rule for a function reads fields in place of x.unwrap(name)"
)
_VIEWS = (
    "give the rule to the op, as torch.ops.aten.t, or to aten.view. Let it make views of the inner tensors, as "
    "x.values.select(...) does. PyTorch records no view for the result of a rule for a function. Where the result "
    "has to be a copy, keep a rule for the function and pass skip={'views', 'writes_to_views'}. Where inner tensors "
    "cannot hold the view, refuse the op with NotImplementedError"
)

_PRODUCT = "where x * x itself fails, correct its rule for two values. Otherwise "

PROMISES = [
    # ---- structure
    Promise(
        "readable",
        "A value and its copy have a shape and a dtype, can be flattened, and can be read as the tensors that they "
        "represent.",
        cases=structure.reads,
        oracle=oracles.unchanged,
        mend=(
            "correct the named fault: the kit tries every other promise once this one is kept. Ops, copies and "
            "compilers make values of fields alone: declare all that materialize() and rules read, as `scale: float "
            "= static()` or `scale: Tensor = inner()`. Let materialize() compute with the fields and not with the "
            "value itself, into new tensors. Fit the sizes of the inner tensors that its error names"
        ),
    ),
    Promise(
        "flatten",
        "__tensor_flatten__ names every inner tensor, by the attribute that holds it.",
        oracle=structure.flatten,
        may_refuse=False,
        mend="return ([names], context), where getattr(self, name) is a tensor for each name, absent ones left out",
    ),
    Promise(
        "round_trip",
        "A value put together from its own parts is the same value.",
        cases=lambda s: [c for c in structure.ROUND_TRIPS if type(tried_alone(c.run, s.make())[0]) is s.cls],
        oracle=structure.round_trip,
        mend=(
            "__tensor_unflatten__ must use every inner tensor and the context, and give back the outer size, stride "
            "and dtype. torch.compile loses each attribute that is neither an inner tensor nor in the context: "
            "return it in the context of __tensor_flatten__"
        ),
        declared=(
            "a value is put together from its fields alone: let materialize(), `outer` and methods compute from "
            "fields. Declare each other attribute that they read, as `scale: float = static()`"
        ),
    ),
    Promise(
        "metadata",
        "Metadata is a constant: hashable, equal for equal values, without tensors.",
        needs=("flatten",),
        oracle=structure.check_metadata,
        may_refuse=False,
        mend=(
            "make the context a tuple or a frozen dataclass of plain values. Tensors belong among the inner "
            "tensors. An object compared by identity makes torch.compile recompile at each call"
        ),
    ),
    Promise(
        "sizes",
        "Sizes are not metadata: values that differ in sizes alone have one context.",
        needs=("flatten",),
        cases=lambda s: [Case("the flatten context of a value", s.context)],
        context=lambda s: [Setting(partial(s.make, make), " of another size") for make in derive.sizes(s)],
        oracle=structure.sizes,
        mend=(
            "leave sizes out of the context: derive the outer size from the inner tensors or from outer_size, which "
            "__tensor_unflatten__ is given. A size in the context is wrong as soon as it is dynamic"
        ),
        declared=_OUTSIDE,
    ),
    Promise(
        "outside",
        "The outside of a value tells the truth.",
        cases=structure.outsides,
        context=CONTEXTS["eager"],
        oracle=by_reference,
        mend="pass the size, dtype and device of the represented tensor to _make_wrapper_subclass",
        declared=_OUTSIDE,
    ),
    Promise(
        "without_data",
        "Values are flattened and unflattened without reading their data.",
        needs=("flatten",),
        cases=lambda s: [SHOWN],
        context=lambda s: [
            Setting(lambda: fake_mode().from_tensor(s.make()), " without data"),
            Setting(partial(structure.rebuilt_fake, s), " without data, put together from its parts"),
        ],
        oracle=by_eager,
        may_refuse=False,
        mend=(
            "no .item(), .tolist() or comparison of contents in __new__, __tensor_flatten__, "
            "__tensor_unflatten__: the compiler calls them on tensors without data; check contents in a "
            "factory function"
        ),
        declared=(
            "no .item(), .tolist() or comparison of contents in `outer`, or in a __new__ or __init__ "
            "of the class: the compiler puts values together without data; check contents in a classmethod "
            "that makes values"
        ),
    ),
    Promise(
        "printing",
        "A value can be printed.",
        cases=lambda s: [
            Case("repr(x)", repr, ("works",)),
            *(
                [Case("repr(x) of a fake", lambda x: repr(fake_mode().from_tensor(x)), ("works",))]
                if s.traceable
                else []
            ),
        ],
        oracle=oracles.unchanged,
        may_refuse=False,
        mend=(
            "define __repr__(self, *, tensor_contents=None) and build the text from the inner tensors; "
            "Tensor's own runs ops that the class may not have"
        ),
    ),
    # ---- values
    Promise(
        "values",
        "An op on a value returns the result of the op on the tensor that the value represents.",
        cases=functional_cases,
        context=CONTEXTS["eager"],
        oracle=by_reference,
        tells=True,
        mend=(
            f"write a rule that computes this result, or refuse the op: {_REFUSE} with a message, or return "
            "NotImplemented. An assert does not refuse. Code runs for any operand of the class, the right one too: "
            "it checks isinstance(operand, cls) before it reads attributes that plain tensors lack"
        ),
        declared=(
            "correct the result of the rule for such operands (a vector, a number, a value on either side), or "
            f"refuse them: {_REFUSE} with a message, or return NotImplemented. A rule is called when any operand is "
            "of the class, the right one too: it checks isinstance(operand, cls) before it reads a field"
        ),
    ),
    Promise(
        "mapped_values",
        "materialize() of a mapped result equals the op on materialize() of the operand.",
        needs=("materialize if mapped",),
        cases=lambda s: functional_cases(s) if s.is_mapped else [],
        context=CONTEXTS["materialized"],
        oracle=by_reference,
        mend=(
            'fallback="map" runs an op on each inner tensor, which is not the op on the result of materialize(): '
            'use fallback="materialize", write rules for the ops, or rename the method if it only reads the inner '
            "tensors. If they are meant to differ: skip={'mapped_values'}"
        ),
    ),
    Promise(
        "keyword_arguments",
        "An argument that is not the default has the effect that it has on the tensor that the value represents.",
        needs=("reference",),
        cases=argument_cases,
        context=CONTEXTS["eager"],
        oracle=by_reference,
        mend=(
            "a rule takes every argument of its op, and refuses arguments that it does not support: an alpha=, "
            "rounding_mode=, keepdim= or dtype= that is dropped, a negative number, or operands in the other order, "
            "is a wrong result without an error"
        ),
    ),
    Promise(
        "plain_operands",
        "A plain operand of another class of tensors, such as a Parameter, is a plain operand.",
        cases=accepted,
        context=CONTEXTS["parameters"],
        oracle=by_eager,
        right=True,
        may_refuse=False,
        mend=(
            "check isinstance(operand, cls), not type(operand) is torch.Tensor: a Parameter has another type, and "
            "so has each plain operand while a compiler traces"
        ),
    ),
    Promise(
        "arguments",
        "An op that is not in place leaves its argument as it was.",
        needs=("flatten",),
        cases=kit_cases,
        oracle=oracles.unchanged,
        tells=True,
        mend=(
            "a rule for an op that is not in place writes to its argument: compute into a new tensor, not by "
            "`add_`, `out=` or an index"
        ),
    ),
    Promise(
        "inference_mode",
        "An op has the same result in inference mode as outside of it.",
        cases=accepted,
        context=CONTEXTS["inference"],
        oracle=by_eager,
        mend=(
            "there, composite ops (linear, matmul, reshape) reach __torch_dispatch__ whole: decompose ops without a "
            "rule with func.decompose(), as outside of inference mode. Make views of a value from outside under "
            "torch.inference_mode(False), for they share its version counter"
        ),
    ),
    Promise(
        "grad_mode",
        "An op gives the same value whether gradients are recorded or not.",
        needs=("gradients",),
        cases=recorded,
        context=CONTEXTS["grad"],
        oracle=by_eager,
        mend="a rule must not read grad mode, and a rule above autograd must have the result of the op below it",
    ),
    Promise(
        "other_metadata",
        "An op on a value with other metadata returns the result of the op on the tensor that this value "
        "represents.",
        cases=lambda s: functional_cases(s) + argument_cases(s),
        context=CONTEXTS["other metadata"],
        oracle=by_reference,
        mend=(
            "a rule must compute with the static and dynamic fields of its operands, and take none of them for "
            f"granted. It refuses operands that it does not support: {_REFUSE}"
        ),
    ),
    Promise(
        "kept_metadata",
        "A result has no default for metadata where the operand has another value.",
        needs=("metadata",),
        cases=lambda s: accepted(s) if s.declared else [],
        context=CONTEXTS["given metadata"],
        oracle=oracles.kept_metadata,
    ),
    Promise(
        "kept_inners",
        "An op on each entry hands on fields that the reference does not show: optional inner tensors, integers as "
        "labels.",
        cases=oracles.pointwise,
        oracle=oracles.kept_inners,
        mend=(
            "the rule makes its result without that inner tensor, or with another: pass on each inner tensor "
            "that it does not compute with, as in type(x)(..., white=x.white). If the op is meant to leave one out, "
            "such as a cache, or to change it: skip={'kept_inners'}"
        ),
    ),
    Promise(
        "two_values",
        "An op on two values with different numbers returns the result of the op on the tensors that they "
        "represent.",
        needs=("reference",),
        cases=oracles.pair_cases,
        context=lambda s: CONTEXTS["two values"](s) + CONTEXTS["other integers"](s),
        oracle=by_reference,
        mend=f"{_BOTH}. It refuses operands that it does not support: {_REFUSE}",
    ),
    Promise(
        "mixed_metadata",
        "An op on two values of different metadata returns the result of the op on the tensors that they represent.",
        cases=PAIRS,
        context=CONTEXTS["mixed metadata"],
        oracle=oracles.mixed_metadata,
        mend=(
            "a rule for an op on two values must read the metadata of both: convert one of them where they differ, "
            f"or refuse the op: {_REFUSE}. If the represented tensor does not depend on the metadata, such as names "
            f"of dimensions: skip={{'mixed_metadata'}}"
        ),
    ),
    Promise(
        "fresh_values",
        "The tensor that a value represents follows a write to its inner tensors.",
        needs=("materialize", "flatten"),
        cases=lambda s: [
            replace(READ, name=f"{READ.name} after {how}", parts=(Case(how, partial(change, s)),))
            for how, change in oracles.CHANGES.items()
        ],
        oracle=oracles.fresh,
        mend=(
            "let materialize() compute from the inner tensors at each call: a kept result, on the value or by "
            "functools.cached_property or lru_cache, is stale after an optimizer's step, a load or any write"
        ),
    ),
    Promise(
        "fresh_results",
        "An op on a value follows a write to its inner tensors, though it was called with the value before.",
        needs=("flatten",),
        cases=oracles.changed_operands,
        oracle=oracles.fresh,
        mend=(
            "a rule computes anew at each call: a result that it keeps, with functools.lru_cache or in a dict by "
            "id(), is stale after an optimizer's step, a load or any write. Leave the cache out"
        ),
    ),
    Promise(
        "cached_inners",
        "No optional inner tensor repeats the others, which an optimizer steps apart from them.",
        cases=lambda s: accepted(s) if s.declared and s.cls._traits.trainable else [],
        oracle=oracles.cached_inners,
        mend=(
            "declare the field that repeats others as inner(derived=function): it is computed when it is "
            "read, and neither trained nor saved"
        ),
    ),
    Promise(
        "randomness",
        "Random ops follow the seed: the same after the same seed, something new at the next call.",
        needs=(
            "reals",
            "many numbers",
        ),
        cases=RANDOM,
        oracle=oracles.randomness,
        mend=(
            "draw from torch's generator at each call, once, by running the op itself on the inner tensors; "
            "keep no generator and no mask"
        ),
    ),
    Promise(
        "random_backward",
        "Forward and backward of dropout drop the same entries.",
        level="gradients",
        needs=(
            "gradients",
            "reals",
        ),
        oracle=oracles.random_backward,
        mend="the backward of a random op must use the mask of its forward: save it, do not draw anew",
        declared=(
            "PyTorch differentiates F.dropout by the ops that it is made of: correct the rules for "
            "those that ran, or let a rule for the function draw one mask and compute with x.unwrap(name)"
        ),
    ),
    Promise(
        "lazy_bits",
        "Conjugate and negative bits are kept, on a value and on its inner tensors.",
        needs=("reference",),
        cases=lambda s: (applicable(s, LAZY) if s.dtype.is_complex else []) + accepted(s)[:9],
        context=CONTEXTS["lazy bits"],
        oracle=by_reference,
        right=True,
        mend=(
            "within __torch_dispatch__ PyTorch does not look at the lazy bits of inner tensors (its issue "
            "130646): resolve them (t.resolve_conj().resolve_neg()) at construction and after _conj and "
            "_neg_view, or hand them on to the outer tensor"
        ),
        declared=(
            "correct the rules that ran: their results for conjugated or negated operands are not "
            "those for the same numbers without the lazy bits, or they drop a sign"
        ),
    ),
    Promise(
        "threads",
        "Calls from several threads at once return the results of the same calls alone.",
        level="gradients",
        cases=lambda s: [
            Case(c.name, lambda run, c=c: [*run(c.run, [s.make(number=SEED + i) for i in range(4)] * 3)])
            for c in oracles.harmless(s)
        ],
        context=CONTEXTS["threads"],
        oracle=by_eager,
        may_refuse=False,
        mend=(
            "keep the state of one call in local variables, not on the class or the module, and set no flag that is "
            "put back later. Another thread must not see a table half filled"
        ),
    ),
    Promise(
        "autocast",
        "Under autocast an op returns, up to rounding, the result of the op on the tensor that the value "
        "represents.",
        needs=("autocast",),
        cases=accepted,
        context=CONTEXTS["autocast"],
        oracle=partial(by_reference, rounded=True),
        right=True,
        mend=(
            "under autocast torch casts the arguments of matrix products before dispatch, by `to`: a rule "
            "must take inputs of a lower dtype than its inner tensors have, and bring both to one"
        ),
    ),
    Promise(
        "strangers",
        "A call with an unknown subclass is left to that subclass, or refused.",
        cases=oracles.STRANGERS,
        oracle=oracles.strangers,
        mend=(
            "in __torch_dispatch__, `return NotImplemented` if types holds a class that you do not know: not "
            "every tensor that is not of your class is a plain one"
        ),
    ),
    # ---- memory
    Promise(
        "views",
        "A view shares memory with the value that it is a view of; a copy does not claim to.",
        cases=partial(applicable, table=VIEWS),
        oracle=structure.views,
        mend=f"{ALIASING}, and make the inner tensors of the result views of the inner tensors",
        declared=_VIEWS,
    ),
    Promise(
        "own_memory",
        "A write to the result of an op that is not a view leaves the value that it was computed from alone.",
        needs=("flatten",),
        cases=structure.writes_to_results,
        oracle=structure.own_memory,
        mend=(
            "the result of an op that is not a view has memory of its own: a rule hands on a copy of an inner "
            "tensor, as in x.values.clone(), and not x.values itself"
        ),
    ),
    Promise(
        "mutation",
        "An in-place op changes the value itself, its sizes too, or is refused and changes nothing.",
        cases=lambda s: [replace(c, parts=(WHOLE, c)) for c in applicable(s, MUTATIONS | METADATA_MUTATIONS)],
        oracle=structure.written,
        mend=(
            "write into the inner tensors (copy_) and return the very argument that was written, with its new "
            "sizes, through return_and_correct_aliasing. Where a class cannot, raise before anything is written"
        ),
        declared=(
            "correct the rule: it writes the new numbers to the inner tensors of x or out= (copy_), and returns "
            "that very argument. Where it cannot, it raises before anything is written"
        ),
    ),
    Promise(
        "writes_to_views",
        "A write to a view reaches every inner tensor of the value: the same view, taken again, has it.",
        needs=("flatten",),
        cases=structure.writes_to_views,
        oracle=structure.written,
        mend=(
            "a view holds views of all inner tensors, none of them a copy: a write to a copy is lost. Let the rule "
            "make each by a view op, such as x.values.select(...), or refuse the op"
        ),
    ),
    Promise(
        "stale_gradients",
        "A gradient that needs a value which has been overwritten is an error.",
        level="gradients",
        oracle=structure.stale_gradients,
        mend=(
            "save tensors with ctx.save_for_backward, and raise version counters of the tensors that a rule writes "
            "to"
        ),
        declared=(
            f"{_PRODUCT}register the rule that writes for the op, as torch.ops.aten.mul_, whose writes are counted. "
            "Let it write to the tensors that its operands hold"
        ),
    ),
    # ---- copies
    Promise(
        "clone_and_detach",
        "clone() gives an equal value with memory of its own, detach() one that shares it.",
        cases=lambda s: structure.LOCAL_COPIES,
        oracle=structure.copied,
        may_refuse=False,
        mend=(
            "clone and detach must give values of the class, with every inner tensor cloned or detached and "
            "the same metadata; torch calls them everywhere"
        ),
    ),
    Promise(
        "deepcopy",
        "copy.deepcopy gives an equal value with memory of its own.",
        cases=lambda s: [structure.DEEPCOPY],
        oracle=structure.copied,
        may_refuse=False,
        mend=(
            "copy every inner tensor and the metadata; without a __deepcopy__ of your own, clone() and "
            "__reduce_ex__ must carry both"
        ),
    ),
    Promise(
        "serialization",
        "A value comes back from pickle and from torch.save, with weights_only=True too.",
        needs=("module",),
        cases=lambda s: (
            FILES
            if all(succeeds(PICKLED.run, t) for t in s.inners(s.make().detach()).values())
            else FILES[1:]
        ),
        oracle=structure.copied,
        may_refuse=False,
        mend=(
            "pickling must carry every inner tensor and the metadata. For torch.load(weights_only=True), build "
            "values by a function or class that is registered with torch.serialization.add_safe_globals"
        ),
    ),
    Promise(
        "parameter",
        "nn.Parameter(x) is a parameter and a value of the class, and moves between modules by state_dict.",
        cases=structure.parameters,
        oracle=structure.copied,
        mend=(
            "detach() must give a value of the class, for nn.Parameter(x) is built on it. "
            "load_state_dict(assign=False) calls weight.copy_(saved): let the class write, for aten.copy_, the inner "
            "tensors of saved to the inner tensors of weight and return weight, or refuse that op"
        ),
    ),
    Promise(
        "optimizer",
        "A step of SGD moves a parameter as it would move the tensor that the parameter represents, or is refused.",
        level="gradients",
        oracle=structure.optimizer,
        mend=(
            f"{_PRODUCT}write rules for the ops that an optimizer calls, such as zeros_like, mul_, add_ and addcdiv_, "
            "or refuse those that write"
        ),
    ),
    Promise(
        "conversion",
        'x.to(dtype) has that dtype, and represents the converted tensor; x.to("meta") moves.',
        cases=lambda s: [*CONVERSIONS, *([NUMBERS] if s.has_reference and s.dtype.is_floating_point else [])],
        context=CONTEXTS["detached"],
        oracle=by_reference,
        mend=(
            "_to_copy must honour dtype=: convert the inner tensors that have the outer dtype, or give "
            "back the plain tensor in that dtype, or refuse"
        ),
    ),
    # ---- gradients
    Promise(
        "gradients",
        "The gradient by a value means the gradient by the tensor that it represents.",
        level="gradients",
        cases=recorded,
        context=CONTEXTS["detached"],
        oracle=gradients.by_gradients,
        right=True,
        mend=(
            "a rule above autograd must be made of differentiable parts (unwrap, not raw inner tensors). A rule "
            "below it must compute the op that PyTorch's formula assumes"
        ),
        declared=_DERIVATIVE,
    ),
    Promise(
        "two_value_gradients",
        "The gradient of an op on two values by each of them means the gradient by the tensor that it represents.",
        level="gradients",
        needs=("reference", "gradients"),
        cases=lambda s: [
            case
            for case in oracles.pair_cases(s)
            if records_on(plains_of(s, two(s)), case) and tried_alone(lambda c=case: c.run(two(s)))[1] is None
        ],
        context=CONTEXTS["two values"],
        oracle=gradients.by_gradients,
        mend=f"{_BOTH}. {_DERIVATIVE}",
    ),
    Promise(
        "operand_gradients",
        "A plain operand of an op, such as the input of a layer, gets the gradient that the reference gives it.",
        level="gradients",
        needs=("one plain tensor",),
        cases=recorded,
        context=CONTEXTS["detached"],
        oracle=partial(gradients.by_gradients, of_operands=True),
        right=True,
        mend=(
            "a rule above autograd computes with a plain operand as it comes, not with operand.detach(), .data or "
            "under no_grad. A rule below it must compute the op that PyTorch's formula assumes"
        ),
    ),
    Promise(
        "inner_requires_grad",
        "An inner tensor that requires grad gets its gradient, or is refused.",
        level="gradients",
        oracle=gradients.inner_requires_grad,
        mend=(
            "in __new__, raise for an inner tensor that requires grad. Or detach it and connect it to the value by "
            "an autograd.Function (subclasses.TensorSubclass does): autograd sees the outer tensor alone"
        ),
    ),
    Promise(
        "materialize_gradients",
        "An inner tensor that materialize() depends on gets the gradient of the result of materialize().",
        level="gradients",
        needs=("declared materialize",),
        cases=lambda s: [Case(name, WHOLE.run) for name in gradients.doubles(s)[1]],
        oracle=gradients.materialize_gradients,
        mend=(
            "let materialize() compute with the tensor itself, not with .detach() or .data of it, nor under "
            "no_grad. If its gradient is meant to be another one, such as a straight-through estimator: "
            "skip={'materialize_gradients'}"
        ),
    ),
    Promise(
        "inner_gradients",
        "Each differentiable inner tensor gets its gradient through each op.",
        level="gradients",
        cases=gradients.sloped,
        oracle=gradients.inner_gradients,
        right=True,
        mend=_DERIVATIVE,
    ),
    Promise(
        "cotangents",
        "A cotangent of the class and a plain one give the same gradient, and are left as they were.",
        level="gradients",
        cases=recorded,
        oracle=gradients.cotangents,
        right=True,
        mend=(
            "a cotangent arrives as a value of the class or as a plain tensor of the outer size: take both (see "
            "wrap_cotangent), or raise; never write into it. A rule for an op that changes some inner tensors "
            "alone, such as "
            "a scale, belongs above autograd: register it for the function, such as torch.mul, and use unwrap. With "
            'fallback="map", a plain cotangent goes to each inner tensor, whatever reference= makes of them: define '
            "wrap_cotangent(self, cotangent) where that is not its meaning, or leave reference= out"
        ),
    ),
    Promise(
        "rules_tried",
        "Every rule of a declared class is put to the test, gradients included.",
        needs=("rules",),
        oracle=rules_tried,
        may_refuse=False,
        mend="write the rule that is missing, or compute with the inner tensors: x.unwrap() above autograd",
    ),
    # ---- compilers
    Promise(
        "compiled_values",
        "A compiled op returns the result of eager mode.",
        level="gradients",
        needs=("flatten",),
        cases=programs.groups,
        context=under(briefly=True),
        oracle=programs.by_compiler,
        mend=(
            "flatten, unflatten and rules must be traceable: no data-dependent Python, no state outside the "
            "inner tensors and the context, the same metadata for a fake as for a real value"
        ),
    ),
    Promise(
        "compiled_mutation",
        "A compiled function that writes to its argument does so, as in eager mode.",
        level="gradients",
        needs=("flatten",),
        cases=lambda s: [program(s, "x.mul_(2); x + x", lambda x: (x.mul_(2), x + x)[1], s.make)],
        context=under(),
        oracle=programs.by_compiler,
        mend="an in-place op must write into the inner tensors; see the promise `mutation`",
    ),
    Promise(
        "compiled_views",
        "A view that a compiled function gives back is one of its argument, as in eager mode.",
        level="gradients",
        needs=("flatten",),
        cases=lambda s: written_views(s, s.make, ".mul_(2)", *RETURNED),
        context=under(),
        oracle=programs.by_compiler,
        mend=(
            "a view must share its storage with its base (see the promise `views`). A class with rules for views "
            "needs a rule for as_strided, with which PyTorch remakes a view of an argument by its sizes and "
            "strides. The outer storage offset and the strides must fit: a rule for a view that changes metadata "
            "alone needs an `outer` that gives them"
        ),
    ),
    Promise(
        "compiled_offsets",
        "Inner tensors that start at different places in their storages give right views when compiled.",
        level="gradients",
        needs=("flatten",),
        cases=programs.offset_views,
        context=programs.with_offsets,
        oracle=programs.by_compiler,
        mend=(
            "as_strided counts from the start of the storage: shift its offset for each inner tensor by where "
            "that one starts, and refuse strides that are not its own"
        ),
    ),
    Promise(
        "compiled_gradients",
        "The gradient of a compiled function equals the gradient of eager mode, for every kind of tangent.",
        level="gradients",
        needs=("flatten",),
        cases=programs.tangents,
        context=under(),
        oracle=programs.by_compiler,
        mend=(
            "the tangent that arrives may be plain, of the class, or missing: see __coerce_tangent_metadata__ "
            "and __coerce_same_metadata_as_tangent__, and the promise `cotangents`"
        ),
    ),
    Promise(
        "compiled_construction",
        "A value may be made from plain tensors, and decomposed, inside a compiled function.",
        level="gradients",
        needs=("flatten", "plain inner tensors"),
        cases=programs.construction,
        context=under(),
        oracle=programs.by_compiler,
        mend="construction must be traceable: no data-dependent checks in __new__, no __init__ that Dynamo skips",
    ),
    Promise(
        "dynamic_shapes",
        "Values of several sizes run through one dynamic program.",
        level="gradients",
        needs=("flatten",),
        cases=programs.other_sizes,
        context=under(),
        oracle=programs.by_compiler,
        mend=(
            "derive sizes from the inner tensors or from outer_size, never from the context, and compute with them "
            "as symbols. A size that may be anything belongs among the dynamic ints"
        ),
    ),
    Promise(
        "metadata_guard",
        "A value with other metadata does not run a program that was compiled for another.",
        level="gradients",
        needs=("flatten",),
        cases=lambda s: programs.in_turn(s, "values with other metadata", [*derive.variants(s), s.factory]),
        context=under(),
        oracle=programs.by_compiler,
        mend=(
            "compare the whole metadata in the context's == and in __metadata_guard__: a program that was "
            "compiled for one value must not run on another"
        ),
    ),
    Promise(
        "compiled_module",
        "A compiled module with a parameter of the class returns the result of eager mode.",
        level="gradients",
        needs=("flatten",),
        cases=programs.modules,
        context=under(),
        oracle=programs.by_compiler,
        mend="a module with a parameter of the class must be traceable; see the promise `compiled_values`",
    ),
    Promise(
        "exported",
        "torch.export takes a module with a parameter of the class, where an op on it gives a plain tensor.",
        level="gradients",
        needs=("flatten",),
        cases=partial(programs.modules, plain=True),
        context=under(EXPORT),
        oracle=programs.by_compiler,
        mend=(
            "torch.export flattens a parameter by __tensor_flatten__: ops on it must give plain tensors in the end, "
            "and a class that is constructed inside needs a constructor that Dynamo traces"
        ),
    ),
    # ---- nesting
    Promise(
        "nested_inside",
        "The inner tensors of a value may be wrappers themselves.",
        cases=accepted,
        context=CONTEXTS["nested inside"],
        oracle=by_eager,
        right=True,
        mend=(
            "treat inner tensors as tensors: ask for no storage, no data_ptr, no exact type torch.Tensor, and "
            "build results by ops on them"
        ),
    ),
    Promise(
        "nested_outside",
        "A value may be the inner tensor of another wrapper.",
        cases=lambda s: [case for case in accepted(s) if case.name not in own_methods(s)],
        context=CONTEXTS["nested outside"],
        oracle=by_eager,
        right=True,
        mend=(
            "run ops by calling the op itself (func) on the inner tensors, so that a wrapper around this one sees "
            "them. A rule for a Python-level function is not called inside of another wrapper, which dispatches ops "
            "alone"
        ),
    ),
    Promise(
        "compiled_nesting",
        "Nested wrappers compile, whichever is outside.",
        level="gradients",
        needs=("flatten",),
        cases=programs.nests,
        context=under(),
        oracle=programs.by_compiler,
        mend="the compiler flattens nested wrappers with __tensor_flatten__, all the way; see `nested_inside`",
    ),
    # ---- many ops, and Inductor
    Promise(
        "op_infos_agree",
        "Each op on PyTorch's own sample inputs returns the result of the reference, or is refused.",
        level="gradients",
        cases=lambda s: op_infos.samples_of(s, s.options.get("ops")),
        oracle=op_infos.on_sample,
        mend="write a rule for the op that computes what its reference does, or refuse the op",
    ),
    Promise(
        "inductor",
        "A program of Inductor returns the results of eager mode.",
        level="full",
        needs=("flatten",),
        cases=lambda s: programs.groups(s, 8)[:1],
        context=under(INDUCTOR),
        oracle=programs.by_compiler,
        mend="see the promise `compiled_values`; where that is kept, report the program to PyTorch",
    ),
]
"""In the order of the report."""
