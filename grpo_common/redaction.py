"""Hides what nobody else should read: keys and passwords in options, command lines, logs and messages.

Secrets are looked for in parsed values: by the name of a key or a flag, in the user part and the query of a URL, in
headers, and in JSON inside a string. Free text (a line of a log, a message) is searched for the same forms.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

HIDDEN = "…"

SECRET_WORDS = frozenset(
    {
        *("password", "passwords", "passwd", "passphrase", "passcode", "pwd", "pw", "secret", "secrets"),
        *("credential", "credentials", "authorization", "authentication", "bearer", "cookie", "cookies"),
        *("apikey", "apikeys", "jwt"),
    }
)
"""A name with one of these words is that of a secret."""
KEY_OWNERS = frozenset(
    {
        *("api", "access", "private", "secret", "auth", "account", "admin", "master", "server", "client", "service"),
        *("ssh", "gpg", "encryption", "signing", "deploy", "storage", "license", "subscription", "shared", "session"),
        *("openai", "anthropic", "hf", "huggingface", "wandb", "vllm", "azure", "aws", "gcp", "google", "trackio"),
    }
)
"""Words before `key` or `keys` that make it a secret: a `sort_key` is none."""
TOKEN_OWNERS = KEY_OWNERS | {"refresh", "bearer", "user", "github", "gitlab", "slack", "csrf"}
"""Words before `tokens` that make them secrets: `max_tokens` are none."""
VOCABULARY = frozenset(
    {
        *("eos", "bos", "pad", "unk", "sep", "cls", "mask", "stop", "start", "end", "begin", "think", "thinking"),
        *("reasoning", "special", "image", "audio", "video", "tool", "per", "by", "each", "next", "first", "last"),
    }
)
"""Words before `token` that make it one of a vocabulary."""
TOKEN_PARTS = frozenset({"value", "read", "write", "string", "str", "key", "prod", "dev"})
"""Words after `token` with which it stays a secret: a `token_budget` is none."""
PASS_OWNERS = frozenset({"user", "db", "database", "smtp", "login", "proxy", "http", "redis", "sudo"})
QUERY_NAMES = frozenset({"key", "sig", "signature", "code", "auth", "pass", "token", "x-amz-signature"})
"""Further names of secrets among the parameters of a URL."""

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_URL_USER = re.compile(
    r"""(?<=://)(?:[^\s/?#"'<>@:]{0,2048}:(?!\d+(?:[/?#\s]|$))[^\s"'<>]{0,2048}|[^\s/?#"'<>]{0,2048})@"""
)
"""The user part of a URL. A password may hold what should have been escaped; a port ends a host."""
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)(?!(?:key|token|auth)\w*\b)([\w.~+/=-]{6,})")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[\w-]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}"
    r"|xox[abprs]-[\w-]{10,}|AKIA[A-Z0-9]{12,}|eyJ[\w-]{8,1024}+\.eyJ[\w-]{8,}(?:\.[\w-]*)?)"
)
"""Keys of known services."""
_NAME = re.compile(
    r"""(?<![\w.-])(?P<name>[\w.-]++)"""
    r"""(?P<between>\\*["']?\s*[:=]\s*|(?<!=)\\*["'],\s*(?=\\*["'])|\s+(?!--|[:=]))"""
)
"""A name and what stands between it and its value: `=`, `:`, or after a flag a space or the comma of a list."""
_VALUE = re.compile(
    r'''"""[\s\S]*?"""|'{3}[\s\S]*?'{3}'''
    r"""|(?P<quote>\\*["'])(?:(?!(?P=quote))(?:\\.|[^\\]))*(?P=quote)"""
    r"""|\[[^\]]*\]?|\{[^}]*\}?"""
    r"""|(?:(?:bearer|basic|token|digest)\s+)?[^\s]+""",
    re.IGNORECASE,
)
_JSON_AFTER = re.compile(r"-{0,2}[\w.-]++=(?=[{\[\"])")
_TO_THE_END = re.compile(r"""[^\r\n"'\\]*""")
_PARAMETER = re.compile(r"""(?<=[?&])([\w.-]++)=[^&#\s"'<>]*&?""")
_IN_A_QUERY = re.compile(r"""[^&#\s"'<>]*""")
_SECRET_FLAG = re.compile(r"(?<!\S)(?:--?[\w.-]+=)?(?P<name>--[\w.-]++)[= ]\s*[^\s-]")
_WHOLE = re.compile(
    r"(?P<name>-{1,2}[\w.-]+|[A-Z][A-Z0-9_]*)=.+|(?P<header>(?i:[\w-]*(?:authorization|cookie))):.+", re.DOTALL
)
"""Text that is a flag or a variable with its value, or a header."""
SHORTEST = 6
"""Characters of a known secret that is looked for in other text."""


def is_secret(name: str) -> bool:
    """Return whether a key, a flag or a variable of this name holds a secret.

    `vllm_api_key`, `--hf-token`, `HF_TOKEN` and `clientSecret` do; `max_tokens`, `stop_token_ids`, `tokenizer_name`,
    `eos_token` and `sort_key` do not.
    """
    words = [word.lower() for word in _WORDS.findall(name)]
    for at, word in enumerate(words):
        before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
        if word in SECRET_WORDS or word.endswith(("password", "passwd", "apikey", "secret")):
            return True
        if word in ("key", "keys") and before in KEY_OWNERS:
            return True
        if word.endswith("token") and before not in VOCABULARY and (not after or after in TOKEN_PARTS):
            return True
        if word.endswith("tokens") and not after and before in TOKEN_OWNERS:
            return True
        if not after and (word == "auth" or (word == "pass" and (not before or before in PASS_OWNERS))):
            return True
    return False


def _is_parameter(name: str) -> bool:
    """Return whether a parameter of a URL holds a secret."""
    return is_secret(name) or name.lower() in QUERY_NAMES


@dataclass
class Redaction:
    """What was hidden in a value."""

    value: Any = None  # the same without secrets
    names: list[str] = field(default_factory=list)  # of what was hidden or left out, such as `trainer.vllm_api_key`
    secrets: set[str] = field(default_factory=set)  # what was hidden as it was; other text may repeat it


def redact(value: Any, *, drop: bool = False, known: Iterable[str] = ()) -> Redaction:
    """Hide the secrets in a parsed value, at every depth of tables, lists and JSON text.

    Args:
        value: mappings, sequences, texts and numbers; anything else stays as it is.
        drop: leave out keys, flags with their values, and parts of URLs instead of writing `HIDDEN` in their place.
            Text is left out as a whole if it is a header or a variable with a secret, or has a known secret or a
            secret flag. Forms amid prose, such as `token=<number>`, count for nothing: a prompt may ask for them.
        known: secrets that are hidden wherever they stand, if they are long enough.
    """
    walk = _Walk(drop, [each for each in known if len(each) >= SHORTEST])
    found = walk.value(value, "")
    return Redaction(None if found is _GONE else found, walk.names, walk.secrets)


def redacted(value: Any) -> Any:
    """Return a parsed value with its secrets hidden; see `redact`."""
    return redact(value).value


def redacted_arguments(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line in which values of secret flags are hidden: `--flag VALUE`, `--flag=VALUE` and others."""
    return tuple(redacted([*words]))


def redacted_text(text: str, known: Iterable[str] = ()) -> str:
    """Return free text, such as a line of a log, with its secrets hidden; `known` ones as in `redact`."""
    return _Walk(False, [each for each in known if len(each) >= SHORTEST]).text(text, "")


_GONE: Any = object()
"""A value that is left out."""


class _Walk:
    def __init__(self, drop: bool, known: Sequence[str]) -> None:
        self._drop, self._known = drop, sorted(known, key=len, reverse=True)
        self.names: list[str] = []
        self.secrets: set[str] = set()

    def value(self, value: Any, where: str) -> Any:
        if isinstance(value, Mapping):
            return self._table(value, where)
        if isinstance(value, (list, tuple)):
            return self._list(value, where)
        if isinstance(value, str):
            return self.text(value, where)
        return self._hidden(value, where) if str(value) in self._known else value

    def _hidden(self, value: Any, where: str) -> Any:
        """Take a value that is secret as a whole."""
        if value is None or isinstance(value, bool) or value in ("", HIDDEN):
            return value  # it says that there is none, or that one is used
        self.names.append(where)
        self._remember(value)
        return _GONE if self._drop else HIDDEN

    def _remember(self, value: Any) -> None:
        if isinstance(value, Mapping):
            value = [*value.values()]
        if isinstance(value, (list, tuple)):
            for each in value:
                self._remember(each)
        elif value is not None and not isinstance(value, bool):
            self.secrets.add(str(value))

    def _table(self, table: Mapping[Any, Any], where: str) -> Any:
        kept = {}
        names = [str(table[key]) for key in ("name", "key") if isinstance(table.get(key), str)]
        of_a_secret = any(map(is_secret, names))  # {"name": "HF_TOKEN", "value": …}
        for key, each in table.items():
            own = self.text(key, where) if isinstance(key, str) else key
            shown = HIDDEN if own is _GONE else own
            name = f"{where}.{shown}" if where else str(shown)
            secret = is_secret(str(key)) or (of_a_secret and str(key) in ("value", "values"))
            clean = self._hidden(each, name) if secret else self.value(each, name)
            if clean is not _GONE and own is not _GONE:
                kept[own] = clean
        return kept

    def _list(self, words: Sequence[Any], where: str) -> list[Any]:
        """Take a list, which may be a command line: all words up to the next flag belong to a secret flag."""
        kept: list[Any] = []
        first = words[0] if len(words) == 2 and isinstance(words[0], str) else ""
        pair = re.fullmatch(r"\w[\w .:-]*", first) is not None and is_secret(first)  # a name and its value
        flag = first if pair else ""
        for at, word in enumerate(words):
            ends = isinstance(word, str) and word.startswith("--")
            if flag and at and not ends:
                clean = self._hidden(word, f"{where} {flag}".strip())
            else:
                clean = self.value(word, f"{where}.{at}")
                pair = pair and (at > 0 or clean == word)  # `Authorization: Bearer …` has its value in itself
                last = word.rpartition("=")[2] if isinstance(word, str) else ""  # `--extra-args=--hf-token`
                is_flag = re.fullmatch(r"--?[A-Za-z][\w.-]*", last) is not None
                flag = (last if is_flag and is_secret(last) else "") or (flag if pair and not at else "")
                if flag and self._drop and not pair:
                    clean = _GONE
            if clean is not _GONE:
                kept.append(clean)
        return kept

    def text(self, text: str, where: str) -> Any:
        if (assigned := _JSON_AFTER.match(text)) and not is_secret(assigned[0]):  # `--kwargs={"api_key": …}`
            clean = self.text(text[assigned.end() :], where)
            return clean if clean is _GONE else assigned[0] + clean
        clean = self._json(text, where) if text.lstrip()[:1] in ("{", "[", '"') else text
        if clean == text:
            clean = self._without_parts(text) if self._drop else self._pieces(text)
            if clean != text:
                self.names.append(where)
        return clean

    def _json(self, text: str, where: str) -> Any:
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError):
            return text
        clean = self.value(parsed, where)
        return text if clean == parsed else clean if clean is _GONE else json.dumps(clean, ensure_ascii=False)

    def _without_parts(self, text: str) -> Any:
        """Return text without the user parts and secret parameters of URLs; nothing if it is a secret otherwise."""

        def kept(found: re.Match[str]) -> str:
            return "" if _is_parameter(found[1]) else found[0]

        names = [found["name"] for found in _SECRET_FLAG.finditer(text)]
        if whole := _WHOLE.fullmatch(text):
            names.append(whole["name"] or whole["header"])
        if any(map(is_secret, names)) or any(known in text for known in self._known):
            return _GONE
        if "://" not in text:
            return text
        clean = _PARAMETER.sub(kept, _URL_USER.sub("", text))
        return clean.rstrip("?&") if clean != text else text

    def _pieces(self, text: str) -> str:
        """Hide secrets in text by their forms."""
        for known in self._known:
            text = text.replace(known, HIDDEN)
        if "://" in text:
            text = _URL_USER.sub(f"{HIDDEN}@", text)
        text = _BEARER.sub(rf"\1\2{HIDDEN}", text)
        text = _SHAPES.sub(HIDDEN, text)
        return self._assignments(text)

    def _assignments(self, text: str) -> str:
        """Hide the values of `name=value`, `name: value` and `--flag value`."""
        parts, done, at = [], 0, 0
        while found := _NAME.search(text, at):
            at = found.end()
            name, between = found["name"], found["between"]
            assigned = between.strip("\"' \\\t\r\n")[:1] in ("=", ":") and bool(between.strip())
            in_query = "=" in between and found.start() and text[found.start() - 1] in "?&"
            secret = _is_parameter(name) if in_query else is_secret(name)
            if not secret or not (assigned or name.startswith("-")):
                at = found.end("name") if not assigned else at
                continue
            value = self._value_at(text, at, name, query=bool(in_query))
            body = text[at:value].strip("\"'\\ ")
            if name.lower() == "token" and re.fullmatch(r"\d{1,7}[.,;)]?", body):
                continue  # one of the vocabulary
            if body and body != HIDDEN:
                quote = re.match(r"\\*[\"']", text[at:value])
                edge = quote[0] if quote and text[at:value].endswith(quote[0]) and value - at > len(quote[0]) else ""
                parts += [text[done:at], edge, HIDDEN, edge]
                self.secrets.add(body)
                done = value
            at = max(value, at)
        return "".join([*parts, text[done:]])

    @staticmethod
    def _value_at(text: str, at: int, name: str, *, query: bool) -> int:
        """Return where the value that begins at `at` ends."""
        if query:
            form = _IN_A_QUERY
        elif re.search(r"(?i)authorization|cookie", name) and text[at : at + 1] not in ('"', "'", "\\"):
            form = _TO_THE_END
        else:
            form = _VALUE
        found = form.match(text, at)
        return found.end() if found else at
