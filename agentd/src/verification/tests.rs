//! Every kind of tampering is played on a good bundle, and named.

use data_encoding::BASE64;
use ed25519_dalek::{Signer, SigningKey};
use serde_json::{Value, json};
use toolproto::ids::CallId;
use toolproto::receipt::{Evidence, Signature, SignedEvidence, evidence_signing_bytes, pre_authentication_encoding};

use super::*;

fn signing_key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

fn sign(payload: &[u8], key: &SigningKey) -> Envelope {
    let sig = key.sign(&pre_authentication_encoding(PAYLOAD_TYPE, payload));
    Envelope {
        payload: BASE64.encode(payload),
        payload_type: PAYLOAD_TYPE.to_owned(),
        signatures: vec![Signature {
            keyid: key_id(key.verifying_key().as_bytes()),
            sig: BASE64.encode(&sig.to_bytes()),
        }],
    }
}

fn receipt(job: JobId, sequence: u64, previous: Option<Digest>, previous_evidence: Option<Digest>) -> Receipt {
    let change = json!({"path": "report.html", "new": {"type": "file", "mode": "0644",
        "digest": Digest::blake3(b"new"), "bytes": 3}});
    let workspace = json!({"state": "direct", "before": Digest::blake3(b"a"), "after": Digest::blake3(b"b"),
        "created": [change]});
    let call = CallId::from_u128(u128::from(sequence));
    let shared = json!({
        "version": 1, "job_id": job, "call_id": call, "sequence": sequence,
        "tool": {"name": "render", "version": 1, "digest": Digest::blake3(b"tool")},
        "policy": {"name": "workspace", "digest": Digest::sha256(b"policy")},
        "enforced": ["pid_namespace"], "not_enforced": [],
        "started": "2026-11-29T12:00:00Z", "ended": "2026-11-29T12:00:01Z",
        "outcome": {"kind": "exited", "exit_status": 0},
        "workspace": workspace, "denied": [], "usage": {"wall_ms": 1000, "cpu_usec": 5},
    });
    let mut record = shared.clone();
    let mut outer = shared;
    extend(
        &mut record,
        json!({"previous": previous_evidence, "uid": 1000, "cgroup": "none",
        "claims": {"arguments_digest": Digest::sha256(b"{}"), "result_digest": Digest::sha256(b"[]")}}),
    );
    let evidence: Evidence = serde_json::from_value(record).unwrap();
    let signature = signing_key(1).sign(&evidence_signing_bytes(&evidence).unwrap());
    let evidence = SignedEvidence { record: evidence, signature: Some(BASE64.encode(&signature.to_bytes())) };
    extend(
        &mut outer,
        json!({"previous": previous, "arguments_digest": Digest::sha256(b"{}"),
        "semantics": {"declared": "mutates_workspace", "observed": "changed"},
        "result": {"digest": Digest::sha256(b"[]"), "bytes": 2, "completeness": "complete"},
        "evidence": evidence, "host": "h", "boot_id": "b", "agentd_version": "0"}),
    );
    serde_json::from_value(outer).unwrap()
}

fn extend(value: &mut Value, with: Value) {
    let (Value::Object(value), Value::Object(with)) = (value, with) else { panic!("objects") };
    value.extend(with.into_iter().filter(|(_, item)| !item.is_null()));
}

fn seal(job: JobId, count: u64, previous: Option<Digest>, evidence_head: Option<Digest>) -> Statement<Seal> {
    Statement {
        kind: STATEMENT_TYPE.to_owned(),
        subject: Vec::new(),
        predicate_type: SEAL_PREDICATE_TYPE.to_owned(),
        predicate: Seal {
            version: 1,
            job_id: job,
            count,
            previous,
            evidence_head,
            sealed: "2026-11-29T12:01:00Z".parse().unwrap(),
            key_id: None,
        },
    }
}

/// Three receipts and their seal.
fn bundle() -> Vec<Envelope> {
    let job = JobId::from_u128(9);
    let (mut envelopes, mut previous, mut previous_evidence) = (Vec::new(), None, None);
    for sequence in 1..=3 {
        let receipt = receipt(job, sequence, previous, previous_evidence);
        previous_evidence = Some(Digest::of_json(&receipt.evidence.record).unwrap());
        let envelope = sign(&serde_json::to_vec(&Statement::about(receipt)).unwrap(), &signing_key(1));
        previous = Some(envelope.digest().unwrap());
        envelopes.push(envelope);
    }
    let seal = seal(job, 3, previous, previous_evidence);
    envelopes.push(sign(&serde_json::to_vec(&seal).unwrap(), &signing_key(1)));
    envelopes
}

fn text(envelopes: &[Envelope]) -> String {
    envelopes.iter().map(|envelope| serde_json::to_string(envelope).unwrap() + "\n").collect()
}

fn faults(text: &str) -> Vec<Fault> {
    let mut faults: Vec<Fault> =
        verify(text, &signing_key(1).verifying_key()).findings.into_iter().map(|finding| finding.fault).collect();
    faults.dedup();
    faults
}

/// A daemon that lies and holds the key all the same: the payload is changed, then signed again.
fn resigned(envelope: &Envelope, change: impl FnOnce(&mut Value)) -> Envelope {
    let mut payload: Value = serde_json::from_slice(&envelope.payload_bytes().unwrap()).unwrap();
    change(&mut payload);
    sign(&serde_json::to_vec(&payload).unwrap(), &signing_key(1))
}

#[test]
fn a_good_bundle_and_a_lone_receipt_are_valid() {
    let envelopes = bundle();
    let report = verify(&text(&envelopes), &signing_key(1).verifying_key());
    assert!(report.is_valid(), "{:?}", report.findings);
    assert_eq!((report.scope, report.receipts), (Scope::Bundle, 3));
    let lone = verify(&text(&envelopes[1..2]), &signing_key(1).verifying_key());
    assert!(lone.is_valid(), "{:?}", lone.findings);
    assert_eq!(lone.scope, Scope::LoneEnvelope);
}

#[test]
fn tampering_with_the_file_is_named() {
    let good = bundle();
    let mut swapped = good.clone();
    swapped.swap(0, 1);
    assert!(faults(&text(&swapped)).contains(&Fault::WrongSequence), "order");
    let without_first = &good[1..];
    assert!(faults(&text(without_first)).contains(&Fault::WrongSequence), "first left out");
    let without_middle = [&good[..1], &good[2..]].concat();
    assert!(faults(&text(&without_middle)).contains(&Fault::BrokenChain), "middle left out");
    assert_eq!(faults(&text(&good[..3])), [Fault::Unsealed], "truncated");
    let without_last = [&good[..2], &good[3..]].concat();
    assert_eq!(faults(&text(&without_last)), [Fault::SealMismatch], "last left out");
    let twice = [&good[..1], &good[..1], &good[1..]].concat();
    assert!(faults(&text(&twice)).contains(&Fault::DuplicateCall), "doubled");
    let appended = [&good[..], &good[..1]].concat();
    assert!(faults(&text(&appended)).contains(&Fault::AfterSeal), "appended");
    assert!(faults(&format!("{}garbage\n", text(&good))).contains(&Fault::Unreadable), "garbage");
}

#[test]
fn tampering_with_an_envelope_is_named() {
    let good = bundle();
    let with = |index: usize, envelope: Envelope| {
        let mut changed = good.clone();
        changed[index] = envelope;
        faults(&text(&changed))
    };
    let mut payload = good[1].clone();
    payload.payload = resigned(&good[1], |value| value["predicate"]["host"] = json!("other")).payload;
    assert!(with(1, payload).contains(&Fault::BadSignature), "content");
    let mut unsigned = good[1].clone();
    unsigned.signatures.clear();
    assert!(with(1, unsigned).contains(&Fault::Unsigned), "signature taken away");
    let other = sign(&good[1].payload_bytes().unwrap(), &signing_key(2));
    assert!(with(1, other.clone()).contains(&Fault::WrongKey), "another key");
    let mut renamed = other;
    renamed.signatures[0].keyid = key_id(signing_key(1).verifying_key().as_bytes());
    assert!(with(1, renamed).contains(&Fault::BadSignature), "another key under the right name");
    let mut kind = good[1].clone();
    kind.payload_type = "text/plain".to_owned();
    assert!(with(1, kind).contains(&Fault::Unreadable), "payload type");
}

/// What is lied about, what it must be named, and the lie.
type Lie<'a> = (&'a str, Fault, &'a dyn Fn(&mut Value));

#[test]
fn a_lying_daemon_is_named() {
    let good = bundle();
    let with = |change: &dyn Fn(&mut Value)| {
        let mut changed = good.clone();
        changed[1] = resigned(&good[1], change);
        faults(&text(&changed))
    };
    let lies: [Lie<'_>; 14] = [
        ("sequence", Fault::EvidenceMismatch, &|v| v["predicate"]["sequence"] = json!(7)),
        ("tool", Fault::EvidenceMismatch, &|v| v["predicate"]["tool"]["name"] = json!("other")),
        ("policy", Fault::EvidenceMismatch, &|v| v["predicate"]["policy"]["name"] = json!("strict")),
        ("enforced", Fault::EvidenceMismatch, &|v| v["predicate"]["enforced"] = json!(["everything"])),
        ("outcome", Fault::EvidenceMismatch, &|v| v["predicate"]["outcome"]["exit_status"] = json!(1)),
        ("code", Fault::EvidenceMismatch, &|v| v["predicate"]["outcome"]["code"] = json!("TOOL_FAILED")),
        ("changes", Fault::EvidenceMismatch, &|v| v["predicate"]["workspace"]["created"] = json!([])),
        ("observed", Fault::EvidenceMismatch, &|v| v["predicate"]["semantics"]["observed"] = json!("unchanged")),
        ("usage", Fault::EvidenceMismatch, &|v| v["predicate"]["usage"]["cpu_usec"] = json!(1)),
        ("result", Fault::EvidenceMismatch, &|v| {
            v["predicate"]["result"]["digest"] = json!(Digest::sha256(b"other"));
        }),
        ("subject", Fault::SubjectMismatch, &|v| v["subject"][0]["digest"]["blake3"] = json!("00")),
        ("times", Fault::TimeReversed, &|v| v["predicate"]["ended"] = json!("2026-11-29T11:00:00Z")),
        ("job", Fault::OtherJob, &|v| v["predicate"]["job_id"] = json!(JobId::from_u128(1))),
        ("evidence", Fault::EvidenceBadSignature, &|v| {
            v["predicate"]["usage"]["cpu_usec"] = json!(1);
            v["predicate"]["evidence"]["record"]["usage"]["cpu_usec"] = json!(1);
        }),
    ];
    for (what, fault, lie) in lies {
        assert!(with(lie).contains(&fault), "{what}: {:?}", with(lie));
    }
    let unsigned = with(&|v| {
        v["predicate"]["evidence"].as_object_mut().unwrap().remove("signature");
    });
    assert!(unsigned.contains(&Fault::EvidenceUnsigned));
}

#[test]
fn receipts_of_two_jobs_and_evidence_out_of_order_are_named() {
    let mut mixed = bundle();
    let other = receipt(JobId::from_u128(10), 2, Some(mixed[0].digest().unwrap()), None);
    mixed[1] = sign(&serde_json::to_vec(&Statement::about(other)).unwrap(), &signing_key(1));
    let found = faults(&text(&mixed));
    assert!(found.contains(&Fault::OtherJob) && found.contains(&Fault::BrokenEvidenceChain), "{found:?}");
}

#[test]
fn an_empty_file_is_not_valid() {
    assert_eq!(faults(""), [Fault::Unsealed]);
}
