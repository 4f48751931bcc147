# A generation worker on CPU. Build from the root: docker build -f docker/worker.Dockerfile -t ktqueue-worker .
FROM python:3.12.12-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /source
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=/source/constraints.txt
COPY constraints.txt .
# torch by its exact version and first: a layer of its own that a change of the source leaves alone
RUN python -m venv /opt/ktqueue \
    && /opt/ktqueue/bin/pip install --extra-index-url "$TORCH_INDEX" \
        "$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)"
COPY . .
RUN /opt/ktqueue/bin/pip install ./csrc '.[worker]'

FROM python:3.12.12-slim-bookworm
COPY --from=build /opt/ktqueue /opt/ktqueue
COPY docker/worker_alive.py /opt/ktqueue/worker_alive.py
ENV PATH=/opt/ktqueue/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1 HF_HOME=/tmp/huggingface
USER 10001:10001
# SIGTERM drains: running jobs finish or go back to the queue, see worker.drain_seconds
STOPSIGNAL SIGTERM
# healthy once the model is loaded and the lease lives; a large model may take its time
HEALTHCHECK --interval=15s --timeout=10s --start-period=600s --retries=3 \
    CMD ["python", "/opt/ktqueue/worker_alive.py"]
ENTRYPOINT ["ktqueue"]
CMD ["worker"]
