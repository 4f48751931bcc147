"""The OpenAPI 3.1 document of the gateway, made from the pydantic models of bodies and answers."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from ktqueue import __version__
from ktqueue.core.codec import Json
from ktqueue.openai import batch_schema as batch_shapes
from ktqueue.openai import schema as shapes
from ktqueue.openai.batches import BatchBody
from ktqueue.openai.chat import ChatBody
from ktqueue.openai.completions import CompletionBody
from ktqueue.openai.files import LONGEST_LIFE, SHORTEST_LIFE
from ktqueue.openai.foreign_fields import refused_fields
from ktqueue.openai.jobs import GenerationBody
from ktqueue.openai.prompt_endpoints import DetokenizeBody, TokenizeBody
from ktqueue.openai.responses.body import ResponseBody

_REQUESTS: tuple[type[BaseModel], ...] = (
    ChatBody,
    CompletionBody,
    ResponseBody,
    GenerationBody,
    TokenizeBody,
    DetokenizeBody,
)
_BODIES_WITHOUT_MODEL: tuple[type[BaseModel], ...] = (BatchBody,)
_ANSWERS: tuple[type[BaseModel], ...] = (
    shapes.ChatCompletion,
    shapes.ChatCompletionChunk,
    shapes.TextCompletion,
    shapes.Tokens,
    shapes.PromptText,
    shapes.InputTokens,
    shapes.ModelList,
    shapes.Model,
    shapes.Job,
    shapes.JobList,
    shapes.JobEvent,
    shapes.ErrorResponse,
    shapes.ResponseObject,
    batch_shapes.Batch,
    batch_shapes.BatchList,
    batch_shapes.File,
    batch_shapes.FileList,
    batch_shapes.DeletedFile,
    shapes.HealthStatus,
    shapes.Status,
    shapes.Version,
)


@dataclass(frozen=True, slots=True)
class Description:
    """An endpoint of another API. Without a `body` its method is GET. `stream` is the media type of its streams.

    `is_job`: a POST submits a job, so it takes an Idempotency-Key.
    """

    path: str
    operation: str
    summary: str
    answer: type[BaseModel]
    error: type[BaseModel]
    body: type[BaseModel] | None = None
    stream: str = ""
    is_job: bool = True

    def json(self) -> Json:
        """Its entry among the paths."""
        if self.body is None:
            return {"get": _get(self.operation, self.summary, self.answer, ("401", "503"), self.error)}
        post = _post(self.operation, self.summary, [self.body], self.answer, error=self.error, is_job=self.is_job)
        if self.stream:
            post["responses"]["200"]["content"][self.stream] = {"schema": {"type": "object"}}
        return {"post": post}


_ERRORS = {
    "400": "A field is wrong.",
    "401": "No API key, or an unknown one.",
    "404": "No such model or job.",
    "409": "The job, batch or file is in a state that does not allow this.",
    "413": "The body is too large.",
    "415": "The body is not JSON, or its compression is not supported.",
    "422": "The idempotency key was used with another request.",
    "429": "The queue is full, or a limit of the tenant is reached; see Retry-After.",
    "503": "No broker, no worker, or too many connections; see Retry-After.",
    "504": "The deadline passed.",
}
_NAME: Json = {"type": "string", "minLength": 1, "maxLength": 255, "pattern": "^[ -~]+$"}  # see checked_key
_MODEL: Json = {
    "anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "null"}],
    "description": "It can be left out if only one model is served.",
}
_FRAME: Json = {"type": "string", "pattern": r"^([0-9]{1,18}(\.[0-9]{1,3})?)?$"}  # see last_place
_READ = ("401", "404", "503")
_WRITE = ("400", "401", "404", "413", "415", "422", "429", "503", "504")


def build_document(others: Sequence[Description] = ()) -> Json:
    """The whole document as plain data. `others`: endpoints of other APIs."""
    more = [model for other in others for model in (other.answer, other.error, other.body) if model is not None]
    models = dict.fromkeys((*_REQUESTS, *_BODIES_WITHOUT_MODEL, *_ANSWERS, *more))
    inputs: list[tuple[type[BaseModel], JsonSchemaMode]] = [(model, "validation") for model in models]
    _, definitions = models_json_schema(inputs, ref_template="#/components/schemas/{model}")
    for body in (*_REQUESTS, *(other.body for other in others if other.body is not None)):
        schema = definitions["$defs"][body.__name__]
        schema["required"] = [name for name in schema.get("required", ()) if name != "model"]
        schema["properties"]["model"] = _MODEL
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "ktqueue",
            "version": __version__,
            "description": "A job queue for Mixture-of-Experts models with OpenAI's API. Fields that are refused "
            f"if they ask for something: {', '.join(refused_fields())}.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": {**_paths(), **{other.path: other.json() for other in others}},
        "components": {
            "schemas": definitions["$defs"],
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _paths() -> Json:
    chat = _post("createChatCompletion", "Answer a conversation.", [ChatBody], shapes.ChatCompletion)
    chat["parameters"].append(_header_parameter("X-Conversation-Id"))
    _add_stream(chat, shapes.ChatCompletionChunk)
    completion = _post("createCompletion", "Continue one or several prompts.", [CompletionBody], shapes.TextCompletion)
    completion["parameters"].append(_header_parameter("X-Conversation-Id"))
    _add_stream(completion, shapes.TextCompletion)
    submit = _post("createJob", "Submit a job.", [GenerationBody, ChatBody], shapes.Job, status="202")
    submit["responses"]["202"]["headers"] = {"Location": _header("The URL of the job.")}
    events = _get(
        "streamJobEvents", "Follow a job's journal, after Last-Event-ID if it is sent.", None, errors=("400", *_READ)
    )
    events["responses"]["200"] = {"description": "Server-sent events.", "content": _stream_of(shapes.JobEvent)}
    events["responses"]["204"] = {"description": "The reader already has the last event."}
    events["parameters"] = [
        {"name": "Last-Event-ID", "in": "header", "schema": {"type": "integer", "minimum": 0}},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
    ]
    conversation = {"name": "conv_id", "in": "query", "required": True, "schema": _NAME}
    resume = _get("resumeStream", "Resume the stream of a conversation.", None, errors=("400", *_READ))
    resume["responses"]["200"] = {
        "description": "Server-sent events, the same as for the first request.",
        "content": _stream_of(shapes.ChatCompletionChunk, shapes.TextCompletion),
    }
    resume["parameters"] = [
        {"name": "Last-Event-ID", "in": "header", "schema": _FRAME},
        {"name": "starting_after", "in": "query", "schema": _FRAME},
    ]
    stop = _get("stopStream", "Cancel the answer of a conversation.", None, errors=("400", "401", "503"))
    stop["responses"]["204"] = {"description": "It is cancelled, or was not running."}
    del stop["responses"]["200"]
    cancel = _get("cancelJob", "Cancel a job.", shapes.Job, errors=("401", "404", "409", "503"))
    retry = _get(
        "retryJob", "Submit a failed job again as a new job.", None, errors=("401", "404", "409", "429", "503")
    )
    retry["responses"]["202"] = {**submit["responses"]["202"]}
    del retry["responses"]["200"]
    listing = _get("listJobs", "List jobs.", shapes.JobList, errors=("400", "401", "503"))
    listing["parameters"] = [
        {"name": "state", "in": "query", "schema": shapes.Job.model_json_schema()["properties"]["state"]},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}},
    ]
    job = [{"name": "job_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    model = [{"name": "model_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/tokenize": {
            "post": _post(
                "tokenize", "Token ids of a text or of messages.", [TokenizeBody, ChatBody], shapes.Tokens, is_job=False
            )
        },
        "/v1/detokenize": {
            "post": _post("detokenize", "The text of token ids.", [DetokenizeBody], shapes.PromptText, is_job=False)
        },
        "/v1/apply-template": {
            "post": _post(
                "applyTemplate", "The prompt that messages become.", [ChatBody], shapes.PromptText, is_job=False
            )
        },
        **_response_paths(),
        **_batch_paths(),
        **_file_paths(),
        "/v1/models": {
            "get": _get("listModels", "List the models that are served.", shapes.ModelList, errors=("401", "503"))
        },
        "/v1/models/{model_id}": {"get": _get("getModel", "Get one model.", shapes.Model), "parameters": model},
        "/v1/stream": {"get": resume, "delete": stop, "parameters": [conversation]},
        "/v1/jobs": {"get": listing, "post": submit},
        "/v1/jobs/{job_id}": {
            "get": _get("getJob", "Get one job, with its result once it has ended.", shapes.Job),
            "delete": cancel,
            "parameters": job,
        },
        "/v1/jobs/{job_id}/events": {"get": events, "parameters": job},
        "/v1/jobs/{job_id}/retry": {"post": retry, "parameters": job},
        "/healthz": {"get": _get("healthz", "Whether the process answers.", shapes.HealthStatus, errors=())},
        "/health": {"get": _get("health", "The same as /healthz.", shapes.HealthStatus, errors=())},
        "/ping": {"get": _get("ping", "The same as /healthz.", shapes.HealthStatus, errors=())},
        "/version": {"get": _get("version", "The version of ktqueue.", shapes.Version, errors=("401",))},
        "/readyz": {
            "get": _get("readyz", "Whether there is a broker and a live worker.", shapes.HealthStatus, errors=("503",))
        },
        "/v1/status": {
            "get": _get("status", "Workers and queues now. Not for tenants.", shapes.Status, errors=("401", "503"))
        },
        "/metrics": {"get": _text("metrics", "Prometheus metrics.")},
        "/openapi.json": {"get": _text("openapi", "This document.", "application/json")},
        "/": {"get": _text("pointer", "The web page for browsers, else a list of routes.")},
    }


def _response_paths() -> Json:
    create = _post("createResponse", "Answer input, as OpenAI's Responses.", [ResponseBody], shapes.ResponseObject)
    create["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "object"}}
    get = _get(
        "getResponse", "Get a response, or follow its events with stream=true.", shapes.ResponseObject, ("400", *_READ)
    )
    get["parameters"] = [
        {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
        {"name": "starting_after", "in": "query", "schema": {"type": "integer", "minimum": 0}},
    ]
    name = [{"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    delete = _get("deleteResponse", "Cancel and forget a response.", None)
    cancel = _get("cancelResponse", "Cancel a response.", shapes.ResponseObject)
    items = _get("listInputItems", "List the items of a response's conversation.", None, ("400", *_READ))
    items["parameters"] = _order_after_limit(100)
    count = _post("countInputTokens", "Tokens of its prompt.", [ResponseBody], shapes.InputTokens, is_job=False)
    return {
        "/v1/responses": {"post": create},
        "/v1/responses/input_tokens": {"post": count},
        "/v1/responses/{response_id}": {"get": get, "delete": delete, "parameters": name},
        "/v1/responses/{response_id}/cancel": {"post": cancel, "parameters": name},
        "/v1/responses/{response_id}/input_items": {"get": items, "parameters": name},
    }


def _batch_paths() -> Json:
    create = _post("createBatch", "Run the requests of an uploaded file.", [BatchBody], batch_shapes.Batch)
    listing = _get("listBatches", "List batches, newest first.", batch_shapes.BatchList, errors=("400", "401", "503"))
    listing["parameters"] = [
        {"name": "after", "in": "query", "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100, "default": 20}},
    ]
    cancel = _get(
        "cancelBatch", "Cancel a batch. What is done is kept.", batch_shapes.Batch, errors=("401", "404", "409", "503")
    )
    name = [{"name": "batch_id", "in": "path", "required": True, "schema": {"type": "string"}}]
    return {
        "/v1/batches": {"get": listing, "post": create},
        "/v1/batches/{batch_id}": {"get": _get("getBatch", "Get a batch.", batch_shapes.Batch), "parameters": name},
        "/v1/batches/{batch_id}/cancel": {"post": cancel, "parameters": name},
    }


def _file_paths() -> Json:
    upload = _post("uploadFile", "Upload a file of requests, for a batch.", [], batch_shapes.File, is_job=False)
    text: Json = {"type": "string"}
    seconds = {"type": "integer", "minimum": SHORTEST_LIFE, "maximum": LONGEST_LIFE}
    upload["requestBody"]["content"] = {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                    "purpose": {"const": "batch"},
                    "expires_after[anchor]": {"const": "created_at"},
                    "expires_after[seconds]": seconds,
                },
            }
        }
    }
    listing = _get("listFiles", "List files.", batch_shapes.FileList, errors=("400", "401", "503"))
    listing["parameters"] = [{"name": "purpose", "in": "query", "schema": text}, *_order_after_limit(10_000)]
    name = [{"name": "file_id", "in": "path", "required": True, "schema": text}]
    read = _text("readFile", "The bytes of a file, or a range of them.", "application/octet-stream")
    read["parameters"] = [{"name": "Range", "in": "header", "schema": text}]
    parts = {"206": read["responses"]["200"], "416": {"description": "The file has no such bytes."}}
    read["responses"] = _responses("200", None, _READ) | read["responses"] | parts
    return {
        "/v1/files": {"get": listing, "post": upload},
        "/v1/files/{file_id}": {
            "get": _get("getFile", "Get the facts of a file.", batch_shapes.File),
            "delete": _get("deleteFile", "Delete a file.", batch_shapes.DeletedFile, ("409", *_READ)),
            "parameters": name,
        },
        "/v1/files/{file_id}/content": {"get": read, "parameters": name},
    }


def _ref(model: type[BaseModel]) -> Json:
    return {"$ref": f"#/components/schemas/{model.__name__}"}


def _header_parameter(name: str) -> Json:
    return {"name": name, "in": "header", "schema": _NAME}


def _header(description: str) -> Json:
    return {"description": description, "schema": {"type": "string"}}


def _stream_of(*models: type[BaseModel]) -> Json:
    """Server-sent events as OpenAPI 3.2 describes them: the schema is that of an event, whose data is JSON."""
    schema = _ref(models[0]) if len(models) == 1 else {"anyOf": [_ref(model) for model in models]}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    return {"text/event-stream": {"schema": {"type": "object", "properties": {"data": data}}}}


def _responses(
    status: str, model: type[BaseModel] | None, errors: tuple[str, ...], error: type[BaseModel] = shapes.ErrorResponse
) -> Json:
    content = {} if model is None else {"content": {"application/json": {"schema": _ref(model)}}}
    responses: Json = {status: {"description": "Done.", **content}}
    for code in errors:
        failed: Json = {"description": _ERRORS[code], "content": {"application/json": {"schema": _ref(error)}}}
        if code in ("429", "503"):
            failed["headers"] = {"Retry-After": _header("Seconds.")}
        responses[code] = failed
    return responses


def _get(
    operation: str,
    summary: str,
    model: type[BaseModel] | None,
    errors: tuple[str, ...] = _READ,
    error: type[BaseModel] = shapes.ErrorResponse,
) -> Json:
    return {"operationId": operation, "summary": summary, "responses": _responses("200", model, errors, error)}


def _order_after_limit(most: int) -> list[Json]:
    return [
        {"name": "order", "in": "query", "schema": {"enum": ["asc", "desc"], "default": "desc"}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
        {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": most}},
    ]


def _text(operation: str, summary: str, media_type: str = "text/plain") -> Json:
    schema = {"type": "object"} if media_type == "application/json" else {"type": "string"}
    content = {media_type: {"schema": schema}}
    return {
        "operationId": operation,
        "summary": summary,
        "responses": {"200": {"description": "Done.", "content": content}},
    }


def _post(
    operation: str,
    summary: str,
    bodies: list[type[BaseModel]],
    answer: type[BaseModel],
    status: str = "200",
    error: type[BaseModel] = shapes.ErrorResponse,
    is_job: bool = True,
) -> Json:
    schema = _ref(bodies[0]) if len(bodies) == 1 else {"anyOf": [_ref(body) for body in bodies]}
    return {
        "operationId": operation,
        "summary": summary,
        "parameters": [_header_parameter("Idempotency-Key")] if is_job else [],
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": _responses(status, answer, _WRITE, error),
    }


def _add_stream(operation: Json, chunk: type[BaseModel]) -> None:
    operation["responses"]["200"]["content"].update(_stream_of(chunk))
