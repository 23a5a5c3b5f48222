//! What all learners must have in common before the first step, as lines of text, so that a difference can be named.

use crate::error::ExchangeError;
use crate::message::VERSION;
use crate::options::Options;
use adacomp::Layout;
use std::sync::Arc;

/// What a learner was started with: on each line a thing, `: `, and what it is.
pub(crate) fn describe(layout: &Layout, options: Options, learners: usize) -> Vec<u8> {
    let Options { strategy, codec, group, owner_divisor } = options;
    let mut lines = vec![
        format!("protocol version: {VERSION}"),
        format!("frame version: {}", adacomp::VERSION),
        format!("number of learners: {learners}"),
        format!("strategy: {strategy}"),
        format!("codec: {codec}"),
        format!("elements of a group: {group}"),
        format!("divisor of owners' bins: {owner_divisor}"),
        format!("soft-threshold factor: {}", layout.soft_threshold()),
        format!("scale: {}", layout.scale()),
        format!("number of parameters: {}", layout.len()),
    ];
    for (number, layer) in layout.layers().iter().enumerate() {
        // A name may have line ends of its own, which must not look like ours.
        let name = layer.name().escape_debug();
        lines
            .push(format!("parameter {number}: `{name}` {:?}, {:#}", layer.parameter.shape, layer.treatment));
    }
    lines.push(format!("layout fingerprint: {:016x}", layout.fingerprint()));
    lines.join("\n").into_bytes()
}

/// That all learners described themselves in the same way: see [`crate::Protocol::description`]. Everybody sees the same
/// texts, so everybody gets the same error.
pub fn check(texts: &[Arc<Vec<u8>>]) -> Result<(), ExchangeError> {
    let Some(first) = texts.first() else { return Ok(()) };
    let Some((learner, other)) = texts.iter().enumerate().find(|(_, text)| *text != first) else {
        return Ok(());
    };
    let (first, other) = (String::from_utf8_lossy(first), String::from_utf8_lossy(other));
    let (mut expected, mut actual) = (first.lines(), other.lines());
    loop {
        let (expected, actual) = (expected.next(), actual.next());
        if expected == actual && expected.is_some() {
            continue;
        }
        let split = |line: Option<&str>| {
            let (what, value) =
                line.unwrap_or("end of the description: there").split_once(": ").unwrap_or_default();
            (what.to_owned(), value.to_owned())
        };
        let (what, expected) = split(expected);
        let (_, actual) = split(actual);
        return Err(ExchangeError::Disagreement { learner, what, expected, actual });
    }
}

#[cfg(test)]
mod tests {
    use super::{check, describe};
    use crate::strategy::Strategy;
    use adacomp::{Parameter, Policy};
    use std::sync::Arc;

    #[test]
    fn another_version_is_named() {
        let layout = Policy::adacomp().layout([Parameter::new("fc", &[40, 50])]).unwrap();
        let ours = describe(&layout, Strategy::Reduce.into(), 3);
        let text = String::from_utf8(ours.clone()).unwrap();
        let theirs = text.replace("protocol version: 1", "protocol version: 2").into_bytes();
        let shorter = text.lines().next().unwrap().as_bytes().to_vec();
        let [ours, theirs, shorter] = [ours, theirs, shorter].map(Arc::new);
        assert!(check(&[ours.clone(), ours.clone()]).is_ok());
        let told = check(&[ours.clone(), ours.clone(), theirs]).unwrap_err().to_string();
        assert_eq!(told, "learner 2 does not fit learner 0: protocol version is 2, but 1 on learner 0");
        let told = check(&[ours, shorter]).unwrap_err().to_string();
        assert!(told.starts_with("learner 1 does not fit learner 0: frame version"), "{told}");
    }
}
