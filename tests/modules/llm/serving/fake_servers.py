"""Servers of HTTP that speak as ``vllm serve`` and as SGLang do, on a model of transformers; and that misbehave."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Coroutine
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.modules.llm.serving.services import LocalService

from rollwright.errors import EngineLostError
from rollwright.modules.llm.engine import Sampling
from rollwright.modules.llm.serving.loop import shared_loop
from rollwright.modules.llm.serving.service import Order
from rollwright.modules.llm.serving.weight_files import WeightFiles


class FakeServer:
    """A server in a thread.

    Args:
        lm: of transformers.
        folder: with the files of the model and its tokenizer.

    Attributes:
        faults: what the next answers of an endpoint are, by path: ``500``, ``"close"`` or ``"half"``.
        asked: bodies, by path.
    """

    freezes = True

    def __init__(self, lm: Any, folder: Path) -> None:
        self.service, self.folder = LocalService(lm, freezes=self.freezes), folder
        self.faults: dict[str, list[Any]] = {}
        self.asked: dict[str, list[Any]] = {}
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None: ...

            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                parts = urlsplit(self.path)
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
                body |= {name: values[0] for name, values in parse_qs(parts.query).items()}
                server.asked.setdefault(parts.path, []).append(body)
                fault = next(iter(server.faults.get(parts.path, [])), None)
                if fault is not None:
                    server.faults[parts.path].pop(0)
                if fault == "close":
                    self.close_connection = True
                    return
                status, answer = (500, "an error") if fault == 500 else server.answer(parts.path, body)
                content = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) // 2] if fault == "half" else content)
                self.close_connection = True

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._http.server_port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        call = getattr(self, path.strip("/").replace("/", "_").replace("v1_", ""), None)
        if call is None:
            return 404, {"detail": "Not Found"}
        try:
            return 200, call(body)
        except EngineLostError as error:
            return 503, {"error": str(error)}
        except (KeyError, ValueError) as error:
            return 400, {"error": repr(error)}

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, shared_loop().loop).result(60)

    def health(self, body: Any) -> Any:
        return {}

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self.service.close()


class FakeVLLM(FakeServer):
    """What ``vllm serve`` with ``VLLM_SERVER_DEV_MODE=1`` and ``--enable-scale-out`` does."""

    mode = "processed_logprobs"
    device, divides = "cpu", False

    def models(self, body: Any) -> Any:
        return {"data": [{"id": "m", "root": str(self.folder), "max_model_len": 512}]}

    def server_info(self, body: Any) -> Any:
        assert body["config_format"] == "json"
        return {
            "vllm_config": {
                "model_config": {"logprobs_mode": self.mode},
                "device_config": {"device_type": self.device},
                "scheduler_config": {"enable_chunked_prefill": self.divides},
            }
        }

    def weight_info(self, body: Any) -> Any:
        return {"weight_version": self.run(self.service.label())}

    def update_weight_version(self, body: Any) -> Any:
        return self.run(self.service.set_label(body["new_version"]))

    def inference_generate(self, body: Any) -> Any:
        how = body["sampling_params"]
        assert how["ignore_eos"]
        assert how["logprobs"] == 0
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        )
        sampling = Sampling(
            max_new_tokens=how["max_tokens"], stop=tuple(how.get("stop", ())), **{name: how[name] for name in names}
        )
        order = Order(
            f"generate-tokens-{body['request_id']}",
            body["token_ids"],
            sampling,
            how["max_tokens"],
            tuple(how["stop_token_ids"]),
            how["seed"],
            body["cache_salt"],
        )
        reply = self.run(self.service.answer(order))
        starts = [0, *(end for _, end in reply.spans)]
        content = [
            {"token_id": token, "logprob": value} for token, value in zip(reply.tokens, reply.log_probs, strict=True)
        ]
        spans = [
            {"version": label, "start": start, "end": end}
            for (label, end), start in zip(reply.spans, starts, strict=False)
        ]
        choice = {"index": 0, "token_ids": reply.tokens, "finish_reason": reply.reason, "weight_versions": spans}
        return {"choices": [choice | {"logprobs": {"content": content}}]}

    def inference_abort_requests(self, body: Any) -> Any:
        return self.run(self.service.abort(body["request_ids"]))

    def pause(self, body: Any) -> Any:
        assert body == {"mode": "keep", "clear_cache": "false"}
        return self.run(self.service.pause())

    def resume(self, body: Any) -> Any:
        return self.run(self.service.resume())

    def collective_rpc(self, body: Any) -> Any:
        assert body["method"] == "reload_weights"
        label = self.run(self.service.label())
        return self.run(self.service.load(WeightFiles(Path(body["kwargs"]["weights_path"])), label, rebuild=False))

    def reset_prefix_cache(self, body: Any) -> Any:
        assert body == {"reset_running_requests": "true"}

        async def rebuild() -> None:
            engine = self.service.engine
            engine.update_weights(engine.model, engine.version, cache="rebuild")

        return self.run(rebuild())


class FakeSGLang(FakeServer):
    """What a server of SGLang does."""

    freezes = False

    def get_model_info(self, body: Any) -> Any:
        label = self.run(self.service.label())
        return {"model_path": str(self.folder), "is_generation": True, "weight_version": label}

    def get_server_info(self, body: Any) -> Any:
        return {"context_length": 512, "version": "0.5"}

    def generate(self, body: Any) -> Any:
        how = body["sampling_params"]
        assert body["return_logprob"]
        assert how["ignore_eos"]
        assert how["no_stop_trim"]
        sampling = Sampling(
            max_new_tokens=how["max_new_tokens"],
            temperature=how["temperature"],
            top_p=how["top_p"],
            top_k=max(how["top_k"], 0),
            stop=tuple(how["stop"] or ()),
        )
        ends, limit = tuple(how["stop_token_ids"]), how["max_new_tokens"]
        reply = self.run(
            self.service.answer(Order(body["rid"], body["input_ids"], sampling, limit, ends, how["sampling_seed"], ""))
        )
        reason = {"stop": {"type": "stop", "matched": 3}, "length": {"type": "length", "length": limit}}
        meta = {
            "id": body["rid"],
            "finish_reason": reason.get(reply.reason, {"type": "abort", "message": "Abort before prefill"}),
            "prompt_tokens": len(body["input_ids"]),
            "completion_tokens": len(reply.tokens),
            "weight_version": reply.spans[-1][0] if reply.spans else "default",
            "output_token_logprobs": [
                [value, token, None] for token, value in zip(reply.tokens, reply.log_probs, strict=True)
            ],
        }
        return {"text": "", "output_ids": reply.tokens, "meta_info": meta}

    def abort_request(self, body: Any) -> Any:
        return self.run(self.service.abort([body["rid"]]))

    def pause_generation(self, body: Any) -> Any:
        assert body == {"mode": "abort"}
        return self.run(self.service.pause())

    def continue_generation(self, body: Any) -> Any:
        return self.run(self.service.resume())

    def update_weights_from_disk(self, body: Any) -> Any:
        assert body["flush_cache"]
        try:
            self.run(self.service.load(WeightFiles(Path(body["model_path"])), body["weight_version"], rebuild=True))
        except ValueError as error:
            return {"success": False, "message": str(error)}
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def update_weight_version(self, body: Any) -> Any:
        self.run(self.service.set_label(body["new_version"]))
        return {"success": True, "message": "", "new_version": body["new_version"]}
