"""The JSON Schema of policy files, made from the model, so that editors complete and check what people write.

Only keywords that mean the same in draft-07 and 2020-12 are used, and no `$ref`, whose neighbours draft-07 ignores.
The committed copy is `policies/dsec-policy.schema.json`; a test compares it with this.
"""

from __future__ import annotations

import json
import types
from collections.abc import Sequence
from enum import Enum
from typing import Annotated, Any, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from dsec_guard.policy.schema import SCHEMA_ID, Policy, Unit, Word, short_form, yaml_fields
from dsec_guard.policy.units import DURATION_PATTERN, SIZE_PATTERN

_PATTERNS = {
    Word.INSIDE: r"^/", Word.PATTERN: r"^/", Word.HOST: r"^/", Word.PLACE: r"^(same$|/)", Word.SYSCALL: r"^[a-z_0-9]+$",
    Word.ERRNO: r"^E[A-Z0-9]+$", Word.VARIABLE: r"^[A-Za-z_][A-Za-z0-9_]*\*?$",
}


def policy_json_schema() -> dict[str, Any]:
    """The schema as plain values, keys in a fixed order."""
    body = _object(Policy)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"https://dsec-guard.invalid/schemas/{SCHEMA_ID}.json",
        "title": "dsec-guard policy",
        **body,
        "properties": {
            "schema": {"const": SCHEMA_ID, "description": "The form of this file."},
            "extends": {"type": "string", "description": "A policy's name or a path; a child only tightens."},
            **body["properties"],
        },
        "required": ["schema"],
    }


def schema_text() -> str:
    """The published file, byte for byte."""
    return json.dumps(policy_json_schema(), indent=2) + "\n"


def _object(model: type[BaseModel]) -> dict[str, Any]:
    required = [name for name, info in yaml_fields(model) if info.is_required()]
    result: dict[str, Any] = {"type": "object"}
    if model.__doc__ and model.__doc__ is not BaseModel.__doc__:
        result["description"] = " ".join(model.__doc__.split())
    result["properties"] = {name: _schema(info.annotation, info.metadata) for name, info in yaml_fields(model)}
    if required:
        result["required"] = required
    result["additionalProperties"] = False
    return result


def _schema(annotation: Any, metadata: Sequence[Any]) -> dict[str, Any]:
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *more = get_args(annotation)
        flat = [m for item in more for m in (item.metadata if isinstance(item, FieldInfo) else [item])]
        return _schema(inner, [*metadata, *flat])
    if origin in (Union, types.UnionType):
        inner = next(a for a in get_args(annotation) if a is not type(None))
        return {"anyOf": [_schema(inner, metadata), {"type": "null"}]}
    if origin is tuple:
        return {"type": "array", "items": _schema(get_args(annotation)[0], ())}
    if origin is dict:
        key, item = get_args(annotation)
        return {"type": "object", "propertyNames": _schema(key, ()), "additionalProperties": _schema(item, ())}
    if issubclass(annotation, BaseModel):
        full = _object(annotation)
        if short_form(annotation):
            info = annotation.model_fields["path"]
            return {"anyOf": [_schema(info.annotation, info.metadata), full]}
        return full
    return _plain(annotation, metadata)


def _plain(kind: type, metadata: Sequence[Any]) -> dict[str, Any]:
    if issubclass(kind, Enum):
        return {"type": "string", "enum": [m.value for m in kind]}
    if Unit.SIZE in metadata:
        return {"type": "string", "pattern": SIZE_PATTERN, "description": "A size with a unit, such as 512MiB or 2GiB."}
    if Unit.DURATION in metadata:
        return {"type": "string", "pattern": DURATION_PATTERN, "description": "A time with a unit, such as 90s or 30min."}
    if kind is bool:
        return {"type": "boolean"}
    if kind in (int, float):
        return {"type": "integer" if kind is int else "number", **_range(metadata)}
    word = next((m for m in metadata if isinstance(m, Word)), None)
    return {"type": "string", "pattern": _PATTERNS[word]} if word in _PATTERNS else {"type": "string"}


def _range(metadata: Sequence[Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for m in metadata:
        if isinstance(m, annotated_types.Ge):
            result["minimum"] = max(m.ge, result.get("minimum", m.ge))
        elif isinstance(m, annotated_types.Gt):
            result["exclusiveMinimum"] = m.gt
        elif isinstance(m, annotated_types.Le):
            result["maximum"] = min(m.le, result.get("maximum", m.le))
    return result
