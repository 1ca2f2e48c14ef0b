"""An S3 store on this machine, and the environment that leads to it."""

from contextlib import contextmanager

import pytest

BUCKET = "shelf"


@contextmanager
def s3_store():
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server")
    running = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    _, port = running.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
            patch.delenv(name, raising=False)
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "reader")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().makedirs(BUCKET, exist_ok=True)  # the server keeps its buckets as long as the process
        yield running
        s3fs.S3FileSystem.clear_instance_cache()
    running.stop()
