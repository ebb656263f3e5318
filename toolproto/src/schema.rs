//! JSON Schemas of what is text in JSON but more in Rust, for the document of the API. The other types derive theirs.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use crate::digest::Digest;
use crate::ids::{CallId, JobId, RequestId};
use crate::manifest::HostPort;

/// A point in time, RFC 3339.
#[derive(Clone, Copy, Debug)]
pub struct Time;

/// A path from the root.
#[derive(Clone, Copy, Debug)]
pub struct AbsolutePath;

macro_rules! text {
    ($($name:ident: $description:literal, $rule:literal = $value:literal;)+) => {
        $(impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                json_schema!({"type": "string", "description": $description, $rule: $value})
            }
        })+
    };
}

text! {
    Time: "RFC 3339", "format" = "date-time";
    AbsolutePath: "A path from the root", "pattern" = "^/";
    // 128 bits in 26 characters of 5: the last one holds only 3.
    JobId: "A job's id", "pattern" = "^[0-9a-v]{25}[048cgkos]$";
    CallId: "A call's id", "pattern" = "^[0-9a-v]{25}[048cgkos]$";
    RequestId: "A request's id", "pattern" = "^[0-9a-v]{25}[048cgkos]$";
    Digest: "An algorithm and a digest in hexadecimal", "pattern" = "^(sha256|blake3):[0-9a-f]{64}$";
    HostPort: "A host's name and a port", "pattern" = "^.+:[0-9]+$";
}
