"""The credentials for buckets, and the server of the requests."""

import os
from collections.abc import Callable
from typing import Any

ENDPOINTS = {"gs": ("GOOGLE_BASE_URL",), "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"), "az": ("AZURE_ENDPOINT",)}
"""Variables with the address of another server than the cloud's own."""


CREDENTIAL_HINTS = {
    "gs": "log in with `gcloud auth application-default login`, or name a key file in GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 for profiles and SSO",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential of Azure",
}
LIST_RIGHTS = {"gs": "storage.objects.list", "s3": "s3:ListBucket", "az": "Storage Blob Data Reader"}


def endpoint(scheme: str) -> str | None:
    """Returns the address of another server than the cloud's own, if the environment names one."""
    return next((os.environ[name] for name in ENDPOINTS[scheme] if name in os.environ), None)


def region() -> str | None:
    """Amazon's region, if the environment names one."""
    return next((os.environ[name] for name in ("AWS_REGION", "AWS_DEFAULT_REGION") if name in os.environ), None)


def credentials(scheme: str) -> tuple[str, Callable[[], Any] | None]:
    """Returns the owner of the credentials: a name for people, and a function that makes obstore's provider; None if
    obstore finds them itself."""
    if names := [name for name in CREDENTIAL_VARIABLES[scheme] if name in os.environ]:
        return f"the environment ({', '.join(names)})", None
    found = _google_credentials() if scheme == "gs" else _boto3_credentials() if scheme == "s3" else None
    return found or ("the credentials of this machine, if it has any", None)


def google_token() -> str | None:
    """Returns a token for GCS; None if this machine has none."""
    if "GOOGLE_BEARER_TOKEN" in os.environ:
        return os.environ["GOOGLE_BEARER_TOKEN"]
    found = _google_credentials()
    return None if found is None else str(found[1]()()["token"])


def _google_credentials() -> tuple[str, Callable[[], Any]] | None:
    """Returns the credentials that google-auth finds, if it is installed: a login of gcloud, a workload identity, a
    metadata server."""
    try:
        import google.auth
        from google.auth.exceptions import DefaultCredentialsError
        from obstore.auth.google import GoogleCredentialProvider
    except ImportError:
        return None
    try:
        found, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/devstorage.read_write"])
    except DefaultCredentialsError:
        return None
    return f"google-auth ({type(found).__module__})", lambda: GoogleCredentialProvider(credentials=found)


def _boto3_credentials() -> tuple[str, Callable[[], Any]] | None:
    """Returns the credentials that boto3 finds, if it is installed: a profile, SSO, a role."""
    try:
        import boto3  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    session = boto3.Session()
    keys = session.get_credentials()
    return None if keys is None else (f"boto3 ({keys.method})", lambda: Boto3CredentialProvider(session))


CREDENTIAL_VARIABLES = {
    "gs": (
        *("GOOGLE_BEARER_TOKEN", "GOOGLE_SERVICE_ACCOUNT", "GOOGLE_SERVICE_ACCOUNT_PATH", "GOOGLE_SERVICE_ACCOUNT_KEY"),
        *("GOOGLE_SKIP_SIGNATURE",),
    ),
    "s3": ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE"),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_KEY", "AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
        *("AZURE_SKIP_SIGNATURE",),
    ),
}
"""Variables by which obstore itself finds credentials. They come before those that other libraries find."""
