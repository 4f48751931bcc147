"""Translations between the JSON of HTTP APIs and ktqueue's own requests and events. Pure: no HTTP, no I/O.

The gateway, batch files and the bridge all use them, so the same body means the same everywhere.

| module | what it translates |
| --- | --- |
| `chat`, `completions` | one endpoint each: its body to requests, its events to answers |
| `endpoint`, `endpoints` | what every generating endpoint must provide; the table of them |
| `jobs`, `records` | the jobs API: the body of a new job; job records and journal events as JSON |
| `common_fields`, `messages`, `foreign_fields` | parts of bodies: shared fields, messages, fields of other servers |
| `choices` | journal events to the text and logprobs of each choice |
| `errors`, `validation` | errors as JSON bodies; pydantic's findings as such errors |
| `schema`, `document` | the shapes of answers; the OpenAPI document |

A new generating endpoint is a module like `chat` (a body, its parser, a class that implements `Reply`) and one
row in `endpoints`. The gateway makes its route from that row.
"""
