"""The HTTP server: routes here, and everything below them in `http`. It keeps no state between requests.

| module | what it does |
| --- | --- |
| `serve`, `app` | run the server; put routes and error responses together |
| `gateway`, `metrics`, `errors` | what all requests share: settings, broker, keys, metrics; errors of the gateway |
| `generation`, `follow`, `answer` | one request: its route, its jobs, their events, its response |
| `conversations`, `jobs`, `models`, `health` | the other routes |
| `feed` | reads the journals of one response ahead |
| `cluster_metrics` | metrics of queues and workers, from Redis |

What bodies and answers mean is in `ktqueue.openai`.
"""
