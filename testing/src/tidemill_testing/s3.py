"""An S3 store on this machine."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import fsspec

_BUCKET = "s3://tests"


@contextmanager
def s3_bucket() -> Iterator[str]:
    """Serve S3 at a free port of this machine, and yield the URL of an empty bucket.

    In the block, environment variables have the address and a key; processes that start there reach the bucket.
    """
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    try:
        with patch.dict("os.environ", environment):
            store, _ = fsspec.url_to_fs(_BUCKET)
            store.mkdir(_BUCKET)
            try:
                yield _BUCKET
            finally:
                store.rm(_BUCKET, recursive=True)  # servers of one process have the same content
                store.clear_instance_cache()
    finally:
        server.stop()
