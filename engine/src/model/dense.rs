//! The one form of a layer that fused kernels compute: attention and a gated feed-forward block, each with what is
//! optional in it.

use super::spec::{Block, Buffer, Matrix, Op, Vector};

/// Holds a layer's operations against the form.
///
/// # Errors
/// The operation that departs from the form, in words.
pub fn check(ops: &[Op]) -> Result<(), String> {
    use Op::{Add, Attend, Bias, GatedActivation, HeadNorm, Multiply, Norm, PostNorm, Rope, Store};
    const REQUIRED: bool = true;
    const OPTIONAL: bool = false;
    let form = [
        (Norm(Vector::AttentionNorm), REQUIRED),
        (
            Multiply(&[
                (Matrix::Query, Buffer::Query),
                (Matrix::Key, Buffer::Key),
                (Matrix::Value, Buffer::Value),
            ]),
            REQUIRED,
        ),
        (Bias(Buffer::Query, Vector::QueryBias), OPTIONAL),
        (Bias(Buffer::Key, Vector::KeyBias), OPTIONAL),
        (Bias(Buffer::Value, Vector::ValueBias), OPTIONAL),
        (HeadNorm(Buffer::Query, Vector::QueryNorm), OPTIONAL),
        (HeadNorm(Buffer::Key, Vector::KeyNorm), OPTIONAL),
        (Rope(Buffer::Query), REQUIRED),
        (Rope(Buffer::Key), REQUIRED),
        (Store, REQUIRED),
        (Attend, REQUIRED),
        (Multiply(&[(Matrix::Output, Buffer::Added)]), REQUIRED),
        (PostNorm(Vector::PostAttentionNorm), OPTIONAL),
        (Add(Block::Attention), REQUIRED),
        (Norm(Vector::FeedForwardNorm), REQUIRED),
        (Multiply(&[(Matrix::Gate, Buffer::Gate), (Matrix::Up, Buffer::Up)]), REQUIRED),
        (GatedActivation, REQUIRED),
        (Multiply(&[(Matrix::Down, Buffer::Added)]), REQUIRED),
        (PostNorm(Vector::PostFeedForwardNorm), OPTIONAL),
        (Add(Block::FeedForward), REQUIRED),
    ];
    let mut rest = ops;
    for (expected, required) in form {
        match rest.split_first() {
            Some((first, after)) if *first == expected => rest = after,
            found if required => {
                let found = found.map_or("the end".to_string(), |(op, _)| op.to_string());
                return Err(format!("{found} where {expected} is expected"));
            }
            _ => {}
        }
    }
    rest.first().map_or(Ok(()), |op| Err(format!("{op} after the last operation")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::architectures;

    #[test]
    fn the_served_architectures_have_the_form_and_what_departs_from_it_is_named() {
        for spec in architectures::ALL {
            assert_eq!(check(spec.layer), Ok(()), "{spec}");
            let bare: Vec<Op> = spec
                .layer
                .iter()
                .copied()
                .filter(|op| op.vector().is_none_or(|vector| !spec.optional.contains(&vector)))
                .collect();
            assert_eq!(check(&bare), Ok(()), "{spec}");
            for at in 0..spec.layer.len() {
                let mut doubled = spec.layer.to_vec();
                doubled.insert(at, spec.layer[at]);
                let problem = check(&doubled).expect_err("one too many");
                assert!(problem.starts_with(&spec.layer[at].to_string()), "{spec} {at}: {problem}");
            }
            assert_eq!(
                check(&spec.layer[..spec.layer.len() - 1]),
                Err("the end where Add(FeedForward) is expected".into())
            );
        }
    }
}
