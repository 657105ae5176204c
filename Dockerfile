# tinyforge on a CPU:
#   docker build -t tinyforge .
#   docker run --rm -it -v "$PWD/runs:/work/runs" tinyforge chat
# With other extras: docker build --build-arg EXTRAS=gguf -t tinyforge .
FROM python:3.13-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
ARG EXTRAS=serve,gguf
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/*.whl)[${EXTRAS}]" && rm -r /wheels \
    && useradd --uid 1000 --create-home tinyforge && mkdir /work && chown tinyforge /work
USER 1000
WORKDIR /work
ENTRYPOINT ["tinyforge"]
CMD ["doctor"]
