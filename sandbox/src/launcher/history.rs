//! The undo store of a workspace: which layers are kept once their jobs have ended, and which call each belongs to.

use std::io;

use toolproto::ids::CallId;

use super::grants::Sharing;
use super::staging_place::{CallNote, RollbackNote};
use crate::protocol::Target;
use crate::workspace::staging::{LeftLayer, StagingError, Standing, WorkspaceStaging};

/// Removes the layers of a job that nobody needs, and the oldest commits beyond what the undo store may take.
///
/// # Errors
/// When the staging directory cannot be read, or no process can be made.
pub fn tidy(staging: WorkspaceStaging, loose: &[u64], sharing: Sharing, undo_bytes: u64) -> io::Result<()> {
    let layers = staging.layers().map_err(io::Error::other)?;
    let is_kept = |layer: &&LeftLayer| matches!(layer.standing, Standing::Applied | Standing::Undone);
    let mut removed: Vec<u64> = layers
        .iter()
        .filter(|layer| loose.contains(&layer.number) && !is_kept(layer))
        .map(|layer| layer.number)
        .collect();
    let mut bytes: u64 = layers.iter().filter(is_kept).map(size_of).sum();
    for layer in layers.iter().filter(is_kept) {
        if bytes <= undo_bytes {
            break;
        }
        bytes = bytes.saturating_sub(size_of(layer));
        removed.push(layer.number);
    }
    let floor = layers.iter().filter(is_kept).map(|layer| layer.number).filter(|number| removed.contains(number)).max();
    if let Some(floor) = floor {
        staging.note_floor(floor).map_err(io::Error::other)?;
    }
    let is_empty = layers.iter().all(|layer| removed.contains(&layer.number));
    if is_empty && sharing == Sharing::Alone { staging.remove() } else { staging.remove_layers(&removed) }
}

fn size_of(layer: &LeftLayer) -> u64 {
    serde_json::from_slice::<CallNote>(&layer.note).map_or(0, |note| note.bytes)
}

/// The last layer that is carried out now.
#[must_use]
pub fn top(layers: &[LeftLayer]) -> u64 {
    let applied = layers.iter().filter(|layer| layer.standing == Standing::Applied);
    applied.map(|layer| layer.number).max().unwrap_or(0)
}

/// The last layer of a state; none if the undo store does not hold the way there any more.
///
/// # Errors
/// When the staging directory cannot be read.
pub fn layer_of(staging: &WorkspaceStaging, target: Target) -> Result<Option<u64>, StagingError> {
    let (Target::After(call) | Target::Before(call)) = target;
    let floor = staging.floor();
    if let Some(note) =
        staging.noted(&call.to_string()).and_then(|note| serde_json::from_slice::<RollbackNote>(&note).ok())
    {
        let layer = if matches!(target, Target::After(_)) { note.to } else { note.from };
        let layers = staging.layers()?;
        let is_there = layer == 0 || layers.iter().any(|one| one.number == layer && one.standing != Standing::Loose);
        return Ok((is_there && layer >= floor).then_some(layer));
    }
    let number = staging.layers()?.into_iter().find(|layer| is_of(layer, call)).map(|layer| layer.number);
    let layer = number.map(|number| if matches!(target, Target::After(_)) { number } else { number - 1 });
    Ok(layer.filter(|layer| *layer >= floor))
}

fn is_of(layer: &LeftLayer, call: CallId) -> bool {
    layer.standing != Standing::Loose
        && serde_json::from_slice::<CallNote>(&layer.note).is_ok_and(|note| note.call == call)
}
