"""The credentials for buckets, and the server of the requests."""

import os
import re
from collections.abc import Callable
from typing import Any

from tpuconv.errors import BucketError, UsageError

ENDPOINTS = {
    "gs": ("GOOGLE_BASE_URL",),
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "az": ("AZURE_ENDPOINT",),
}
"""Variables with the address of another server than the cloud's own."""


CREDENTIAL_HINTS = {
    "gs": "log in with `gcloud auth application-default login`, or name a key file in GOOGLE_APPLICATION_CREDENTIALS",
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or install boto3 for profiles and SSO",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME, and AZURE_STORAGE_ACCOUNT_KEY or another credential of Azure",
}
RIGHTS = {
    "gs": {
        "read": "storage.objects.get",
        "listed": "storage.objects.list",
        "written": "storage.objects.create",
        "deleted": "storage.objects.delete",
    },
    "s3": {
        "read": "s3:GetObject",
        "listed": "s3:ListBucket",
        "written": "s3:PutObject",
        "deleted": "s3:DeleteObject",
    },
    "az": {
        "read": "Storage Blob Data Reader",
        "listed": "Storage Blob Data Reader",
        "written": "Storage Blob Data Contributor",
        "deleted": "Storage Blob Data Contributor",
    },
}
"""The names of the rights, by scheme and by what is done with an object; of Azure the names of roles."""


def endpoint(scheme: str) -> str | None:
    """Returns the address of another server than the cloud's own, if the environment names one.

    Raises:
        UsageError: it is no address. obstore ends as if of a bug then.
    """
    for name in ENDPOINTS[scheme]:
        if name in os.environ:
            if not re.match(r"https?://[^/\s]", os.environ[name]):
                raise UsageError(
                    f"the variable {name} is {os.environ[name]!r}, which is not the address of a server",
                    hint="set it to an address such as https://HOST:PORT, or unset it",
                )
            return os.environ[name]
    return None


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
    if (found := _google_credentials()) is None:
        return None
    from google.auth.exceptions import GoogleAuthError

    try:
        return str(found[1]()()["token"])
    except GoogleAuthError as e:
        raise BucketError(f"google-auth gives no token: {e}", hint=CREDENTIAL_HINTS["gs"]) from None


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
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped]
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ImportError:
        return None
    try:
        session = boto3.Session()
        keys = session.get_credentials()
    except BotoCoreError as e:  # a profile that does not exist, a broken file of settings, a login that has ended
        raise BucketError(f"the credentials of boto3 cannot be read: {e}", hint=CREDENTIAL_HINTS["s3"]) from None
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
