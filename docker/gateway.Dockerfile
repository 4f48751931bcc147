# The HTTP front and the control worker: no torch, no model. Build from the root: docker build -f docker/gateway.Dockerfile -t ktqueue-gateway .
FROM python:3.12.12-slim-bookworm AS build
WORKDIR /source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/source/constraints.txt
COPY . .
RUN python -m venv /opt/ktqueue && /opt/ktqueue/bin/pip install '.[gateway,arq,s3]'

FROM python:3.12.12-slim-bookworm
COPY --from=build /opt/ktqueue /opt/ktqueue
ENV PATH=/opt/ktqueue/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 KTQUEUE_GATEWAY_HOST=0.0.0.0 \
    KTQUEUE_GATEWAY_PROBE_PORT=8001
RUN install -d -o 10001 -g 10001 -m 700 /files
USER 10001:10001
EXPOSE 8000 8001
# 8001 answers probes alone, also when 8000 is flooded
HEALTHCHECK --interval=10s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8001/healthz', timeout=2)"]
ENTRYPOINT ["ktqueue"]
CMD ["gateway"]
