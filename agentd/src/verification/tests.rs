//! Every kind of tampering is played on a good bundle, and named.

use data_encoding::BASE64;
use ed25519_dalek::pkcs8::EncodePublicKey;
use ed25519_dalek::pkcs8::spki::der::pem::LineEnding;
use ed25519_dalek::{Signer, SigningKey};
use serde_json::{Value, json};
use toolproto::digest::canonical_json;
use toolproto::ids::CallId;
use toolproto::key_history::{KEY_CHANGE_VERSION, KeyChange, OldKey, OldSignature, PublicKey};
use toolproto::receipt::{
    Evidence, Signature, SignedEvidence, evidence_signing_bytes, key_id, pre_authentication_encoding,
};

use super::*;

fn signing_key(seed: u8) -> SigningKey {
    SigningKey::from_bytes(&[seed; 32])
}

/// A key file of these keys.
fn ring(seeds: &[u8]) -> KeyRing {
    let pem = |seed: &u8| signing_key(*seed).verifying_key().to_public_key_pem(LineEnding::LF).unwrap();
    KeyRing::from_pem(&seeds.iter().map(pem).collect::<String>()).unwrap()
}

fn id(seed: u8) -> String {
    key_id(signing_key(seed).verifying_key().as_bytes())
}

fn sign(payload: &[u8], key: &SigningKey) -> Envelope {
    sign_by(payload, &[key])
}

fn sign_by(payload: &[u8], keys: &[&SigningKey]) -> Envelope {
    let bytes = pre_authentication_encoding(PAYLOAD_TYPE, payload);
    let signature = |key: &&SigningKey| Signature {
        keyid: key_id(key.verifying_key().as_bytes()),
        sig: BASE64.encode(&key.sign(&bytes).to_bytes()),
    };
    Envelope {
        payload: BASE64.encode(payload),
        payload_type: PAYLOAD_TYPE.to_owned(),
        signatures: keys.iter().map(signature).collect(),
    }
}

fn receipt(job: JobId, sequence: u64, previous: Option<Digest>, previous_evidence: Option<Digest>) -> Receipt {
    receipt_by(1, job, sequence, previous, previous_evidence)
}

fn receipt_by(
    seed: u8,
    job: JobId,
    sequence: u64,
    previous: Option<Digest>,
    previous_evidence: Option<Digest>,
) -> Receipt {
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
    let signature = signing_key(seed).sign(&evidence_signing_bytes(&canonical_json(&evidence).unwrap()));
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
    bundle_by([1; 4])
}

/// Three receipts and their seal, each signed by the key of its seed.
fn bundle_by(seeds: [u8; 4]) -> Vec<Envelope> {
    let job = JobId::from_u128(9);
    let (mut envelopes, mut previous, mut previous_evidence) = (Vec::new(), None, None);
    for (sequence, seed) in (1..=3).zip(seeds) {
        let receipt = receipt_by(seed, job, sequence, previous, previous_evidence);
        previous_evidence = Some(Digest::of_json(&receipt.evidence.record).unwrap());
        let envelope = sign(&serde_json::to_vec(&Statement::about(receipt)).unwrap(), &signing_key(seed));
        previous = Some(envelope.digest().unwrap());
        envelopes.push(envelope);
    }
    let seal = seal(job, 3, previous, previous_evidence);
    envelopes.push(sign(&serde_json::to_vec(&seal).unwrap(), &signing_key(seeds[3])));
    envelopes
}

fn text(envelopes: &[Envelope]) -> String {
    envelopes.iter().map(|envelope| serde_json::to_string(envelope).unwrap() + "\n").collect()
}

fn faults(text: &str) -> Vec<Fault> {
    faults_by(text, &ring(&[1]))
}

fn faults_by(text: &str, ring: &KeyRing) -> Vec<Fault> {
    let mut faults: Vec<Fault> = verify(text, ring).findings.into_iter().map(|finding| finding.fault).collect();
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
    let report = verify(&text(&envelopes), &ring(&[1]));
    assert!(report.is_valid(), "{:?}", report.findings);
    assert_eq!((report.scope, report.receipts), (Scope::Bundle, 3));
    let lone = verify(&text(&envelopes[1..2]), &ring(&[1]));
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

#[test]
fn a_job_that_lived_through_a_change_of_the_key_is_one_chain_for_who_has_both_keys() {
    let across = bundle_by([1, 2, 2, 2]);
    let report = verify(&text(&across), &ring(&[2, 1]));
    assert!(report.is_valid(), "{:?}", report.findings);
    let told: Vec<_> = report.keys.iter().map(|key| (key.key_id.clone(), key.envelopes)).collect();
    assert_eq!(told, [(id(1), 1), (id(2), 3)]);
    assert_eq!(faults_by(&text(&across), &ring(&[2])), [Fault::WrongKey, Fault::EvidenceBadSignature]);

    let former = verify(&text(&bundle()), &ring(&[2, 1]));
    assert!(former.is_valid(), "{:?}", former.findings);
    assert_eq!(former.key_id, id(1), "which key, is said");
}

fn public(seed: u8) -> PublicKey {
    let public_key = signing_key(seed).verifying_key().to_public_key_pem(LineEnding::LF).unwrap();
    PublicKey { key_id: id(seed), public_key }
}

/// The keys 1, 2 and 3 after each other; 1 has signed off, 2 was not there any more.
fn key_history() -> Vec<Envelope> {
    let mut envelopes: Vec<Envelope> = Vec::new();
    let old = |seed: u8, signature: OldSignature| Some(OldKey { key: public(seed), signature });
    let keys = [(None, 1), (old(1, OldSignature::Present), 2), (old(2, OldSignature::Missing), 3)];
    for (sequence, (old, new)) in (1..).zip(keys) {
        let previous = envelopes.last().map(|last| last.digest().unwrap());
        let time = "2026-11-29T12:00:00Z".parse().unwrap();
        let change = KeyChange { version: KEY_CHANGE_VERSION, sequence, previous, time, old, new: public(new) };
        let payload = serde_json::to_vec(&Statement::of_key_change(change)).unwrap();
        let (first, second) = (signing_key(1), signing_key(new));
        envelopes.push(if new == 2 { sign_by(&payload, &[&second, &first]) } else { sign(&payload, &second) });
    }
    envelopes
}

#[test]
fn a_history_of_keys_is_verified_and_tampering_with_it_is_named() {
    let good = key_history();
    let all = ring(&[3, 2, 1]);
    let report = verify(&text(&good), &all);
    assert!(report.is_valid(), "{:?}", report.findings);
    assert_eq!(report.scope, Scope::KeyHistory);

    let with = |line: usize, seed: u8, change: &dyn Fn(&mut Value)| {
        let mut payload: Value = serde_json::from_slice(&good[line].payload_bytes().unwrap()).unwrap();
        change(&mut payload);
        let mut changed = good.clone();
        changed[line] = sign(&serde_json::to_vec(&payload).unwrap(), &signing_key(seed));
        faults_by(&text(&changed), &all)
    };
    let later = |value: &mut Value| value["predicate"]["time"] = json!("2026-11-30T12:00:00Z");
    assert!(with(1, 3, &later).contains(&Fault::Unsigned), "resigned by another key");
    assert!(with(1, 2, &later).contains(&Fault::OldSignatureMismatch), "resigned by the key that came alone");
    let claimed = with(2, 3, &|value| value["predicate"]["old"]["signature"] = json!("present"));
    assert_eq!(claimed, [Fault::OldSignatureMismatch], "a signature that is claimed");
    let other = |value: &mut Value| {
        value["predicate"]["old"] = json!({"key_id": id(1), "public_key": public(1).public_key, "signature": "missing"})
    };
    assert_eq!(with(2, 3, &other), [Fault::KeyMismatch], "another key that goes");
    let renamed = |value: &mut Value| value["predicate"]["new"]["public_key"] = json!(public(1).public_key);
    assert_eq!(with(2, 3, &renamed), [Fault::KeyMismatch], "a key under another's id");

    let mut edited = good.clone();
    let mut payload: Value = serde_json::from_slice(&good[1].payload_bytes().unwrap()).unwrap();
    later(&mut payload);
    edited[1].payload = BASE64.encode(&serde_json::to_vec(&payload).unwrap());
    assert!(faults_by(&text(&edited), &all).contains(&Fault::BadSignature), "edited without a key");
    let mut stripped = good.clone();
    stripped[1].signatures.truncate(1);
    assert!(faults_by(&text(&stripped), &all).contains(&Fault::OldSignatureMismatch), "a signature taken away");
    assert_eq!(faults_by(&text(&good[..2]), &all), [Fault::Unsealed], "the last left out");
    assert!(faults_by(&text(&good[1..]), &all).contains(&Fault::WrongSequence), "the first left out");
    let without_middle = [&good[..1], &good[2..]].concat();
    assert!(faults_by(&text(&without_middle), &all).contains(&Fault::BrokenChain), "the middle left out");
    assert_eq!(faults_by(&text(&good), &ring(&[3, 1])), [Fault::WrongKey], "a key that the verifier does not have");
    assert!(faults_by(&format!("{}{{}}\n", text(&good)), &all).contains(&Fault::Unreadable));
    let mixed = [&bundle()[..1], &good[..1], &bundle()[1..]].concat();
    assert!(faults_by(&text(&mixed), &all).contains(&Fault::Unreadable), "no bundle brings its own keys");
}
