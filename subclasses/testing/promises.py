"""The table of promises: which cases run in which contexts, and which oracle judges them."""

from __future__ import annotations

from functools import partial

from subclasses.testing import compiled, gradients, memory, op_infos, structure, values
from subclasses.testing.calls import PAIRS, RANDOM, VIEWS, Case
from subclasses.testing.cases import (
    accepted,
    applicable,
    argument_cases,
    functional_cases,
    kit_cases,
    own_methods,
    recorded,
    rules_tried,
)
from subclasses.testing.report import Promise
from subclasses.testing.values import CONTEXTS, by_eager, by_reference

ALIASING = (
    "end __torch_dispatch__ with `return torch.utils._python_dispatch.return_and_correct_aliasing(func, "
    "args, kwargs, out)`"
)
_OUTSIDE = (
    "say with size_from=, dtype_from= or `outer` what the value shows: the size, dtype and device of what "
    "materialize() gives, computed from the inner tensors"
)
_REFUSE = "raise subclasses.DispatchError or NotImplementedError"
_BOTH = (
    "a rule for an op on several values computes each inner tensor of its result from those of all of "
    "them, in the order of the operands, and with each argument, such as alpha=: for x + y, from x.field and "
    "y.field, and not from x.field twice"
)
_DERIVATIVE = (
    "PyTorch's formula for the op is the derivative of a rule for an op of a representation: the rule "
    "must compute the op of the tensors that the values represent. PyTorch differentiates the ops of any "
    "other rule on inner tensors: it sees none where the rule calls detach(), reads .data, converts to "
    "numpy or turns gradients off, or where a rule for a function reads fields in place of x.unwrap(name)"
)
_VIEWS = (
    "give the rule to the op, as torch.ops.aten.t, or to aten.view, and let it make views of the inner "
    "tensors, as x.values.select(...) does; what a rule for a function returns is no view to PyTorch. "
    "Where the result has to be a copy, keep a rule for the function and pass skip={'views', "
    "'writes_to_views'}; what inner tensors cannot say, refuse with NotImplementedError"
)

PROMISES = [
    # ---- structure
    Promise(
        "readable",
        "A value has a shape and a dtype, can be flattened, and says what it stands for, as its copy does.",
        structure.readable,
        mend="correct what is named: each other promise needs it, and is tried when this one is kept. "
        "Ops, copies and compilers make values of fields alone: declare what materialize() and rules "
        "read, as `scale: float = static()` or `scale: Tensor = inner()`, let materialize() compute with "
        "the fields and not with the value itself, into new tensors, and fit the sizes of the inner "
        "tensors that its error names",
        may_refuse=False,
    ),
    Promise(
        "flatten",
        "__tensor_flatten__ names every inner tensor, by the attribute that holds it.",
        structure.flatten,
        mend="return ([names], context), where getattr(self, name) is a tensor for each name, absent ones left out",
        may_refuse=False,
    ),
    Promise(
        "round_trip",
        "A value put together from its own parts is the same value.",
        structure.round_trip,
        lambda s: [Case(*item) for item in structure.ROUND_TRIPS.items()],
        mend="__tensor_unflatten__ must use every inner tensor, the context, and give back the outer "
        "size, stride and dtype; what is neither an inner tensor nor in the context is lost under "
        "torch.compile: return it in the context of __tensor_flatten__",
        declared="a value is put together from its fields alone: let materialize(), `outer` and methods "
        "compute from fields, and declare what else they read, as `scale: float = static()`",
    ),
    Promise(
        "metadata",
        "Metadata is a constant: hashable, equal for equal values, without tensors.",
        structure.check_metadata,
        mend="make the context a tuple or a frozen dataclass of plain values; tensors belong among the "
        "inner tensors, and an object compared by identity makes torch.compile recompile at each call",
        may_refuse=False,
        needs=("flatten",),
    ),
    Promise(
        "sizes",
        "Sizes are no metadata: values that differ in sizes alone have one context.",
        structure.sizes,
        mend="leave sizes out of the context: derive the outer size from the inner tensors or from "
        "outer_size, which __tensor_unflatten__ is given; a size in the context is wrong as soon as it is "
        "dynamic",
        declared=_OUTSIDE,
        needs=("flatten",),
    ),
    Promise(
        "outside",
        "The outside of a value tells the truth.",
        structure.outside,
        mend="pass the size, dtype and device of what the value stands for to _make_wrapper_subclass",
        declared=_OUTSIDE,
    ),
    Promise(
        "without_data",
        "Values are taken apart and put together without a look at their data.",
        structure.without_data,
        mend="no .item(), .tolist() or comparison of contents in __new__, __tensor_flatten__, "
        "__tensor_unflatten__: the compiler calls them on tensors without data; check contents in a "
        "factory function",
        declared="no .item(), .tolist() or comparison of contents in `outer`, or in a __new__ or __init__ "
        "of the class: the compiler puts values together without data; check contents in a classmethod "
        "that makes values",
        may_refuse=False,
        needs=("flatten",),
    ),
    Promise(
        "printing",
        "A value can be printed.",
        structure.printing,
        mend="define __repr__(self, *, tensor_contents=None) and build the text from the inner tensors; "
        "Tensor's own runs ops that the class may not have",
        may_refuse=False,
    ),
    # ---- values
    Promise(
        "values",
        "An op on a value gives what it gives on the tensor that the value stands for.",
        by_reference,
        functional_cases,
        f"write a rule that computes this, or refuse the op: {_REFUSE} with a message, or return "
        f"NotImplemented; an assert is no refusal. Code that is called with any operand of the class, the "
        "right one too, asks isinstance(operand, cls) before it reads what a plain tensor lacks",
        declared="correct what the rule gives for such operands (a vector, a number, a value on either "
        f"side), or refuse them: {_REFUSE} with a message, or return NotImplemented. A rule is called "
        f"when any operand is of the class, the right one too: it asks isinstance(operand, cls) before it "
        "reads a field",
        tells=True,
        context=CONTEXTS["eager"],
    ),
    Promise(
        "mapped_values",
        "What materialize() gives of a result that was mapped is the op on what it gives of the operand.",
        values.mapped_values,
        values.mapped_cases,
        'fallback="map" runs an op on each inner tensor, which is not the op on what materialize() gives: use '
        'fallback="materialize", write rules for the ops, or give the method that is no more than a reading of the '
        "inner tensors another name. If they are meant to differ: skip={'mapped_values'}",
    ),
    Promise(
        "keyword_arguments",
        "An argument that is not the default means what it means for the tensor that the value stands for.",
        by_reference,
        argument_cases,
        "a rule takes every argument of its op, and refuses those that it has no answer to: an alpha=, "
        "rounding_mode=, keepdim= or dtype= that is dropped, a negative number, or operands in the other "
        "order, is a wrong result without an error",
        needs=("reference",),
        context=CONTEXTS["eager"],
    ),
    Promise(
        "plain_operands",
        "A plain operand of another class of tensors, such as a Parameter, is a plain operand.",
        by_eager,
        accepted,
        "ask isinstance(operand, cls) of an operand, not type(operand) is torch.Tensor: a Parameter is of "
        "another type, and so is each plain operand while a compiler traces",
        right=True,
        may_refuse=False,
        context=CONTEXTS["parameters"],
    ),
    Promise(
        "arguments",
        "An op that is not in place leaves its argument as it was.",
        values.arguments,
        kit_cases,
        "a rule for an op that is not in place writes to its argument: compute into a new tensor, not by "
        "`add_`, `out=` or an index",
        tells=True,
        needs=("flatten",),
    ),
    Promise(
        "inference_mode",
        "An op gives in inference mode what it gives outside of it.",
        by_eager,
        accepted,
        "there, composite ops (linear, matmul, reshape) reach __torch_dispatch__ whole: take those "
        "without a rule apart with func.decompose(), as outside of inference mode; views of a value from "
        "outside must be made under torch.inference_mode(False), for they share its version counter",
        context=CONTEXTS["inference"],
    ),
    Promise(
        "grad_mode",
        "An op gives the same value whether gradients are recorded or not.",
        by_eager,
        recorded,
        "a rule must not look at grad mode, and a rule above autograd must give what the op below it gives",
        needs=("gradients",),
        context=CONTEXTS["grad"],
    ),
    Promise(
        "other_metadata",
        "An op on a value with other metadata gives what it gives on the tensor that this value stands for.",
        by_reference,
        lambda s: functional_cases(s) + argument_cases(s),
        "a rule must compute with the static and dynamic fields of its operands, none of which it may "
        f"take for granted; what it has no answer to it refuses: {_REFUSE}",
        context=CONTEXTS["other metadata"],
    ),
    Promise(
        "kept_metadata",
        "A result has no default for metadata where the operand has another value.",
        values.kept_metadata,
        lambda s: accepted(s) if s.declared else [],
        needs=("metadata",),
    ),
    Promise(
        "kept_inners",
        "An op on each entry hands on what the reference does not show: optional inner tensors, integers as labels.",
        values.kept_inners,
        values.pointwise,
        "the rule makes its result without that inner tensor, or with another: pass on what it does not "
        "compute with, as in type(x)(..., white=x.white). If the op is meant to leave one out, such as a "
        "cache, or to change it: skip={'kept_inners'}",
    ),
    Promise(
        "two_values",
        "An op on two values with different numbers gives what it gives on the tensors that they stand for.",
        by_reference,
        values.pair_cases,
        f"{_BOTH}; what it has no answer to it refuses: {_REFUSE}",
        needs=("reference",),
        context=lambda s: CONTEXTS["two values"](s) + CONTEXTS["other integers"](s),
    ),
    Promise(
        "mixed_metadata",
        "An op on two values of different metadata gives what it gives on the tensors that they stand for.",
        values.mixed_metadata,
        lambda s: [Case(name, run) for name, run in PAIRS.items()],
        "a rule for an op on two values must look at the metadata of both: convert one of them where they differ, or "
        f"refuse the op: {_REFUSE}. If what a value stands for does not depend on its metadata, as on names of "
        "dimensions: skip={'mixed_metadata'}",
        context=CONTEXTS["mixed metadata"],
    ),
    Promise(
        "fresh_values",
        "What a value stands for follows a write to its inner tensors.",
        values.fresh_values,
        lambda s: [Case(how, partial(change, s)) for how, change in values.CHANGES.items()],
        mend="let materialize() compute from the inner tensors at each call: what it keeps, on the value "
        "or by functools.cached_property or lru_cache, is stale after a step of an optimizer, a load or "
        "any write",
        needs=("materialize", "flatten"),
    ),
    Promise(
        "fresh_results",
        "An op on a value follows a write to its inner tensors, though it was called with the value before.",
        values.fresh_results,
        values.computed,
        "a rule computes anew at each call: what it keeps for an operand, with functools.lru_cache or in "
        "a dict by id(), is stale after a step of an optimizer, a load or any write. Leave the cache out",
        needs=("flatten",),
    ),
    Promise(
        "cached_inners",
        "No optional inner tensor repeats the others, which an optimizer steps apart from them.",
        values.cached_inners,
        lambda s: accepted(s) if s.declared and s.cls._traits.trainable else [],
        "declare the field that repeats others as inner(derived=function): it is computed when it is "
        "read, and neither trained nor saved",
    ),
    Promise(
        "randomness",
        "Random ops follow the seed: the same after the same seed, something new at the next call.",
        values.randomness,
        lambda s: [Case(name, run) for name, run in RANDOM.items()],
        "draw from torch's generator at each call, once, by running the op itself on the inner tensors; "
        "keep no generator and no mask",
    ),
    Promise(
        "random_backward",
        "Forward and backward of dropout agree on what was dropped.",
        values.random_backward,
        mend="the backward of a random op must use the mask of its forward: save it, do not draw anew",
        declared="PyTorch differentiates F.dropout by the ops that it is made of: correct the rules for "
        "those that ran, or let a rule for the function draw one mask and compute with x.unwrap(name)",
        level="gradients",
    ),
    Promise(
        "lazy_bits",
        "Conjugate and negative bits are kept, on a value and on its inner tensors.",
        values.lazy_bits,
        values.lazy_cases,
        "within __torch_dispatch__ PyTorch does not look at the lazy bits of inner tensors (its issue "
        "130646): resolve them (t.resolve_conj().resolve_neg()) at construction and after _conj and "
        "_neg_view, or hand them on to the outer tensor",
        declared="correct the rules that ran: their results for conjugated or negated operands are not "
        "those for the same numbers without the lazy bits, or they drop a sign",
        needs=("reference",),
        context=CONTEXTS["lazy bits"],
    ),
    Promise(
        "threads",
        "Calls from several threads at once give what each gives alone.",
        values.threads,
        mend="keep what belongs to one call in local variables: no scratch on the class or the module, no "
        "flag that is set and put back; a table that is filled on the way must not be seen half filled",
        level="gradients",
        may_refuse=False,
    ),
    Promise(
        "autocast",
        "What an op gives under autocast is, up to rounding, what it gives there on the tensor stood for.",
        partial(by_reference, rounded=True),
        accepted,
        "under autocast torch casts the arguments of matrix products before dispatch, by `to`: a rule "
        "must take inputs of a lower dtype than its inner tensors have, and bring both to one",
        right=True,
        context=CONTEXTS["autocast"],
    ),
    Promise(
        "strangers",
        "A call with an unknown subclass is left to that subclass, or refused.",
        values.strangers,
        lambda s: [Case(name, run) for name, run in values.STRANGERS.items()],
        "in __torch_dispatch__, `return NotImplemented` if types holds a class that you do not know: not "
        "every tensor that is not of your class is a plain one",
    ),
    # ---- memory
    Promise(
        "views",
        "A view shares memory with the value that it is a view of; a copy does not claim to.",
        memory.views,
        partial(applicable, table=VIEWS),
        f"{ALIASING}, and make the inner tensors of the result views of the inner tensors",
        declared=_VIEWS,
    ),
    Promise(
        "own_memory",
        "A write to the result of an op that is no view leaves the value that it was computed from alone.",
        memory.written,
        memory.writes_to_results,
        "the result of an op that is no view has memory of its own: a rule hands on a copy of an inner "
        "tensor, as in x.values.clone(), and not x.values itself",
        needs=("flatten",),
    ),
    Promise(
        "mutation",
        "An in-place op changes the value itself, its sizes too, or is refused and changes nothing.",
        memory.written,
        memory.mutations,
        "write into the inner tensors (copy_) and return the very argument that was written, with its new "
        "sizes, through return_and_correct_aliasing; where a class cannot, raise before anything is "
        "written",
        declared="correct the rule: it writes the new numbers to the inner tensors of what is to be "
        "written (copy_), x or out=, and returns that very argument; where it cannot, it raises before "
        "anything is written",
    ),
    Promise(
        "writes_to_views",
        "What is written to a view is in the value, in every inner tensor: the same view, taken again, has it.",
        memory.written,
        memory.writes_to_views,
        "a view holds views of all inner tensors, none of them a copy: what is written to the view is "
        "lost otherwise. Let the rule make each by a view op, such as x.values.select(...), or refuse the "
        "op",
        needs=("flatten",),
    ),
    Promise(
        "stale_gradients",
        "A gradient that needs a value which has been overwritten is an error.",
        memory.stale_gradients,
        mend="save tensors with ctx.save_for_backward, and raise version counters of what a rule writes to",
        declared="register the rule that writes for the op, as torch.ops.aten.mul_, whose writes are "
        "counted, and write to the tensors that its operands hold",
        level="gradients",
    ),
    # ---- copies
    Promise(
        "clone_and_detach",
        "clone() gives an equal value with memory of its own, detach() one that shares it.",
        structure.copied,
        structure.local_copies,
        "clone and detach must give values of the class, with every inner tensor cloned or detached and "
        "the same metadata; torch calls them everywhere",
        may_refuse=False,
    ),
    Promise(
        "deepcopy",
        "copy.deepcopy gives an equal value with memory of its own.",
        structure.copied,
        lambda s: [structure.DEEPCOPY],
        "copy every inner tensor and the metadata; without a __deepcopy__ of your own, clone() and "
        "__reduce_ex__ must carry both",
        may_refuse=False,
    ),
    Promise(
        "serialization",
        "A value comes back from pickle and from torch.save, with weights_only=True too.",
        structure.copied,
        structure.files,
        "pickling must carry every inner tensor and the metadata; for torch.load(weights_only=True) build "
        "values by a function or class that is registered with torch.serialization.add_safe_globals",
        may_refuse=False,
    ),
    Promise(
        "parameter",
        "nn.Parameter(x) is a parameter and a value of the class, and moves between modules by state_dict.",
        structure.copied,
        structure.parameters,
        "detach() must give a value of the class, for nn.Parameter(x) is built on it. "
        "load_state_dict(assign=False) calls weight.copy_(saved): let the class write the inner tensors of the one to "
        "those of the other for aten.copy_ and return it, or refuse that op",
    ),
    Promise(
        "optimizer",
        "A step of SGD moves a parameter as it would move what the parameter stands for, or is refused.",
        structure.optimizer,
        mend="an optimizer calls zeros_like, mul_, add_, addcdiv_ and the like on a parameter and its "
        "gradient; write rules for them, or refuse those that write",
        level="gradients",
    ),
    Promise(
        "conversion",
        'x.to(dtype) has that dtype, and stands for the converted tensor; x.to("meta") moves.',
        structure.conversion,
        lambda s: structure.CONVERSIONS,
        mend="_to_copy must honour dtype=: convert the inner tensors that have the outer dtype, or give "
        "back the plain tensor in that dtype, or refuse",
    ),
    # ---- gradients
    Promise(
        "gradients",
        "The gradient by a value means the gradient by the tensor that it stands for.",
        gradients.by_gradients,
        recorded,
        "a rule above autograd must be made of differentiable parts (unwrap, not raw inner tensors); a "
        "rule below it must compute what PyTorch's formula for the op assumes",
        declared=_DERIVATIVE,
        level="gradients",
        right=True,
        context=CONTEXTS["detached"],
    ),
    Promise(
        "two_value_gradients",
        "The gradient of an op on two values by each of them means that by the tensor that it stands for.",
        gradients.by_gradients,
        gradients.recorded_pairs,
        f"{_BOTH}. {_DERIVATIVE}",
        level="gradients",
        needs=("reference", "gradients"),
        context=CONTEXTS["two values"],
    ),
    Promise(
        "operand_gradients",
        "A plain operand of an op, such as the input of a layer, gets the gradient that the reference gives it.",
        partial(gradients.by_gradients, of_operands=True),
        recorded,
        "a rule above autograd computes with a plain operand as it comes, not with operand.detach(), "
        ".data or under no_grad; a rule below it must compute what PyTorch's formula for the op assumes",
        level="gradients",
        right=True,
        context=CONTEXTS["detached"],
        needs=("one plain tensor",),
    ),
    Promise(
        "inner_requires_grad",
        "An inner tensor that requires grad gets its gradient, or is refused.",
        gradients.inner_requires_grad,
        mend="in __new__, raise for an inner tensor that requires grad, or detach it and connect it to "
        "the value by an autograd.Function (subclasses.TensorSubclass does): autograd sees the outer "
        "tensor alone",
        level="gradients",
    ),
    Promise(
        "materialize_gradients",
        "An inner tensor that materialize() depends on gets from it the gradient of what it gives.",
        gradients.materialize_gradients,
        mend="let materialize() compute with the tensor itself, not with .detach() or .data of it, nor "
        "under no_grad. If its gradient is meant to be another one, as that of a straight-through "
        "estimator: skip={'materialize_gradients'}",
        level="gradients",
        needs=("declared materialize",),
    ),
    Promise(
        "inner_gradients",
        "Each differentiable inner tensor gets its gradient through each op.",
        gradients.inner_gradients,
        recorded,
        _DERIVATIVE,
        level="gradients",
        right=True,
    ),
    Promise(
        "cotangents",
        "A cotangent of the class and a plain one give the same gradient, and are left as they were.",
        gradients.cotangents,
        recorded,
        "a cotangent arrives as a value of the class or as a plain tensor of the outer size: take both (see "
        "wrap_cotangent), or raise; never write into it. A rule for an op that changes some inner tensors "
        "alone, such as "
        "a scale, belongs above autograd: register it for the function, such as torch.mul, and use unwrap. With "
        'fallback="map", a plain cotangent goes to each inner tensor, whatever reference= makes of them: define '
        "wrap_cotangent(self, cotangent) where that is not its meaning, or leave reference= out",
        level="gradients",
        right=True,
    ),
    Promise(
        "rules_tried",
        "Every rule of a declared class is put to the test, gradients included.",
        rules_tried,
        mend="write the rule that is missing, or compute with the inner tensors: x.unwrap() above autograd",
        may_refuse=False,
        needs=("rules",),
    ),
    # ---- compilers
    Promise(
        "compiled_values",
        "A compiled op gives what it gives in eager mode.",
        compiled.by_compiler,
        compiled.groups,
        "flatten, unflatten and rules must be traceable: no data-dependent Python, no state outside the "
        "inner tensors and the context, the same metadata for a fake as for a real value",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(briefly=True),
    ),
    Promise(
        "compiled_mutation",
        "A compiled function that writes to its argument does so, as in eager mode.",
        compiled.by_compiler,
        compiled.mutations,
        "an in-place op must write into the inner tensors; see the promise `mutation`",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "compiled_views",
        "A view that a compiled function gives back is one of its argument, as in eager mode.",
        compiled.by_compiler,
        compiled.written_views,
        "a view must share its storage with its base (see the promise `views`), and a class with rules "
        "for views needs one for as_strided, with which PyTorch remakes a view of an argument by its "
        "sizes and strides; the outer storage offset must fit, and so must the strides: a rule for a view "
        "that changes metadata alone needs an `outer` that gives them",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "compiled_offsets",
        "Inner tensors that start at different places in their storages give right views when compiled.",
        compiled.by_compiler,
        compiled.offset_views,
        "as_strided counts from the start of the storage: shift its offset for each inner tensor by where "
        "that one starts, and refuse strides that are not its own",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "compiled_gradients",
        "A compiled function's gradient is that of eager mode, for every kind of tangent.",
        compiled.by_compiler,
        compiled.tangents,
        "the tangent that arrives may be plain, of the class, or missing: see __coerce_tangent_metadata__ "
        "and __coerce_same_metadata_as_tangent__, and the promise `cotangents`",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "compiled_construction",
        "A value may be made from plain tensors, and taken apart, inside a compiled function.",
        compiled.by_compiler,
        compiled.construction,
        "construction must be traceable: no data-dependent checks in __new__, no __init__ that Dynamo skips",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "dynamic_shapes",
        "Values of several sizes run through one dynamic program.",
        compiled.by_compiler,
        compiled.other_sizes,
        "derive sizes from the inner tensors or from outer_size, never from the context, and compute with "
        "them as symbols; a size that may be anything belongs among the dynamic ints",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "metadata_guard",
        "A value with other metadata does not run a program that was compiled for another.",
        compiled.by_compiler,
        compiled.other_metadata,
        "compare the whole metadata in the context's == and in __metadata_guard__: a program that was "
        "compiled for one value must not run on another",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "compiled_module",
        "A compiled module with a parameter of the class gives what it gives in eager mode.",
        compiled.by_compiler,
        compiled.modules,
        "a module with a parameter of the class must be traceable; see the promise `compiled_values`",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    Promise(
        "exported",
        "torch.export takes a module with a parameter of the class, where an op on it gives a plain tensor.",
        compiled.by_compiler,
        partial(compiled.modules, plain=True),
        "torch.export takes a parameter apart by __tensor_flatten__: ops on it must give plain tensors in "
        "the end, and a class that is constructed inside needs a constructor that Dynamo traces",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(compiled.EXPORT),
    ),
    # ---- nesting
    Promise(
        "nested_inside",
        "The inner tensors of a value may be wrappers themselves.",
        by_eager,
        accepted,
        "treat inner tensors as tensors: ask for no storage, no data_ptr, no exact type torch.Tensor, and "
        "build results by ops on them",
        right=True,
        context=CONTEXTS["nested inside"],
    ),
    Promise(
        "nested_outside",
        "A value may be the inner tensor of another wrapper.",
        by_eager,
        lambda s: [case for case in accepted(s) if case.name not in own_methods(s)],
        "run ops by calling the op itself (func) on the inner tensors, so that a wrapper around this one "
        "sees them. A rule for a Python-level function is not asked inside of another wrapper, which asks "
        "for ops alone",
        right=True,
        context=CONTEXTS["nested outside"],
    ),
    Promise(
        "compiled_nesting",
        "Nested wrappers compile, whichever is outside.",
        compiled.by_compiler,
        compiled.nests,
        "the compiler takes nested wrappers apart with __tensor_flatten__, all the way; see `nested_inside`",
        level="gradients",
        needs=("flatten",),
        context=compiled.under(),
    ),
    # ---- many ops, and Inductor
    Promise(
        "op_infos_agree",
        "PyTorch's own sample inputs of each op give what they give on the reference, or are refused.",
        op_infos.on_sample,
        op_infos.promised_samples,
        mend="write a rule for the op that computes what its reference does, or refuse the op",
        level="gradients",
    ),
    Promise(
        "inductor",
        "A program of Inductor gives what eager mode gives.",
        compiled.by_compiler,
        lambda s: compiled.groups(s, 8)[:1],
        "see the promise `compiled_values`; where that is kept, report the program to PyTorch",
        level="full",
        needs=("flatten",),
        context=compiled.under(compiled.INDUCTOR),
    ),
]
"""In the order of the report."""
