"""Bodies that are no request: byte by byte, over a raw socket, each followed by a good request."""

from __future__ import annotations

import json
from typing import Any

import pytest

DEEP = 200_000
OK = b'"model":"scripted","messages":[{"role":"user","content":"x"}]'

BODIES: dict[str, bytes] = {
    "empty": b"",
    "space": b"   ",
    "null": b"null",
    "true": b"true",
    "number": b"5",
    "string": b'"x"',
    "list": b"[]",
    "list of objects": b"[{}]",
    "truncated object": b'{"model":"scripted"',
    "truncated string": b'{"model":"scr',
    "truncated escape": b'{"model":"\\u00',
    "trailing comma": b"{" + OK + b",}",
    "trailing text": b"{" + OK + b"}x",
    "two objects": b"{" + OK + b"}{" + OK + b"}",
    "single quotes": b"{'model':'scripted'}",
    "unquoted key": b"{model:1}",
    "number key": b"{1:2}",
    "comment": b"{/* hi */" + OK + b"}",
    "byte order mark": b"\xef\xbb\xbf{" + OK + b"}",
    "utf-16": ("{" + OK.decode() + "}").encode("utf-16"),
    "latin-1": b'{"model":"\xe9","messages":[{"role":"user","content":"x"}]}',
    "overlong utf-8": b'{"model":"\xc0\xaf"}',
    "bad utf-8 in text": b'{"model":"scripted","messages":[{"role":"user","content":"\xff\xfe"}]}',
    "bad utf-8 in a key": b'{"\xff":1}',
    "lone surrogate": b'{"model":"scripted","messages":[{"role":"user","content":"\\ud800"}]}',
    "control character": b'{"model":"scripted","messages":[{"role":"user","content":"a\nb"}]}',
    "NaN": b"{" + OK + b',"temperature":NaN}',
    "Infinity": b"{" + OK + b',"temperature":Infinity}',
    "huge float": b"{" + OK + b',"temperature":1e999}',
    "huge integer": b"{" + OK + b',"max_tokens":' + b"9" * 5000 + b"}",
    "leading zero": b"{" + OK + b',"n":01}',
    "hexadecimal": b"{" + OK + b',"n":0x1}',
    "plus": b"{" + OK + b',"n":+1}',
    "bare point": b"{" + OK + b',"temperature":.5}',
    "deep lists": b'{"messages":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep unknown": b"{" + OK + b',"x":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep open": b"[" * DEEP,
    "deep refused field": b"{" + OK + b',"tools":' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "deep metadata": b"{" + OK + b',"metadata":{"a":' + b'{"a":' * 5000 + b"1" + b"}" * 5001 + b"}",
    "fractional n": b"{" + OK + b',"n":1.5}',
    "boolean n": b"{" + OK + b',"n":true}',
    "text n": b"{" + OK + b',"n":"2"}',
    "object n": b"{" + OK + b',"n":{}}',
    "list model": b'{"model":["scripted"],"messages":[]}',
    "messages as object": b'{"model":"scripted","messages":{"role":"user"}}',
    "message as text": b'{"model":"scripted","messages":["x"]}',
    "message as null": b'{"model":"scripted","messages":[null]}',
    "nested messages": b'{"model":"scripted","messages":[[{"role":"user","content":"x"}]]}',
    "content as number": b'{"model":"scripted","messages":[{"role":"user","content":1}]}',
    "content as object": b'{"model":"scripted","messages":[{"role":"user","content":{}}]}',
    "part as text": b'{"model":"scripted","messages":[{"role":"user","content":["x"]}]}',
    "unknown key": b"{" + OK + b',"zzz":1}',
    "long unknown key": b"{" + OK + b',"' + b"z" * 1_000_000 + b'":1}',
    "key of controls": b"{" + OK + b',"' + b"\\u0001" * 100_000 + b'":1}',
    "empty key": b"{" + OK + b',"":1}',
    "prototype": b"{" + OK + b',"__proto__":{}}',
    "python names": b"{" + OK + b',"__class__":"x","self":1}',
    "form": b"model=scripted&messages=x",
    "xml": b"<?xml version='1.0'?><a/>",
    "msgpack": b"\x81\xa5model\xa8scripted",
    "gzip": b"\x1f\x8b\x08\x00\x00\x00\x00\x00",
    "zeros": b"\x00" * 1000,
    "many stops": b"{" + OK + b',"stop":[' + b",".join([b'"a"'] * 10_000) + b"]}",
    "many biases": b"{" + OK + b',"logit_bias":{' + b",".join(b'"%d":1' % i for i in range(5000)) + b"}}",
    "bias on everything": b"{" + OK + b',"logit_bias":{"*":1}}',
}

ACCEPTED: dict[str, bytes] = {
    "plain": b"{" + OK + b"}",
    "nul in text": b'{"model":"scripted","messages":[{"role":"user","content":"a\\u0000b"}]}',
    "last of duplicate keys wins": b'{"model":"other",' + OK + b"}",
    "negative zero": b"{" + OK + b',"temperature":-0.0}',
    "white space": b" \r\n\t{ " + OK + b" } \n",
    "surrogate pair": b'{"model":"scripted","messages":[{"role":"user","content":"\\ud83d\\ude00"}]}',
    "escaped key": b'{"mod\\u0065l":"scripted","messages":[{"role":"user","content":"x"}]}',
}


def post(server: Any, body: bytes) -> tuple[int, bytes]:
    status, headers, raw = server.request("POST", "/v1/chat/completions", body)
    assert headers["content-type"] == "application/json"
    return status, raw


@pytest.mark.parametrize("name", BODIES)
def test_a_malformed_body_is_400_in_the_openai_shape_and_harms_nothing(plain: Any, name: str) -> None:
    before = len(plain.backend.requests)
    status, raw = post(plain, BODIES[name])
    assert status == 400, raw[:500]
    error = json.loads(raw)["error"]
    assert list(error) == ["message", "type", "param", "code"]
    assert (error["type"], bool(error["message"])) == ("invalid_request_error", True)
    assert len(raw) < 16 * 1024
    assert not any(leak in raw for leak in (b"/usr/", b"0x7f", b"Traceback", b"msgspec", b".py"))
    assert len(plain.backend.requests) == before
    assert plain.chat()[0] == 200


@pytest.mark.parametrize("name", ACCEPTED)
def test_odd_but_legal_bodies_are_answered(plain: Any, name: str) -> None:
    status, raw = post(plain, ACCEPTED[name])
    assert status == 200, raw


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("name", ["empty", "list", "truncated string", "deep objects", "deep open", "latin-1"])
def test_the_other_endpoints_are_as_sturdy(plain: Any, path: str, name: str) -> None:
    status, _, raw = plain.request("POST", path, BODIES[name])
    assert (status, list(json.loads(raw))) == (400, ["error"])


def test_a_body_beyond_the_limit_is_413_with_and_without_a_length(serve: Any) -> None:
    server = serve(max_body_size=1000)
    connection = server.connect()
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 1001\r\n\r\n"
    )
    assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
    connection.close()
    connection = server.connect()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked"
    connection.sendall(head + b"\r\n\r\n7d0\r\n" + b" " * 2000 + b"\r\n")
    answer = connection.recv(4096)
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'{"error":{' in answer
    connection.close()
    assert server.complete()[0] == 200
