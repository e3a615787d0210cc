"""Answers in French. The topic stands between guillemets, in English.

A model of this size does not know French nouns it was not trained on; what it was not told it makes up.
The kind of thing is said first: with that word written down, the sentence after it is one that fits.
"""

from __future__ import annotations

import random

from demo_training.prompts import Prompt

_OPENINGS = (
    "Bonne question ! « {topic} », c'est {kind}.",
    "Avec plaisir ! « {topic} », c'est {kind}.",
    "Très bien ! Pour moi, « {topic} », c'est {kind}.",
)
_KINDS = {
    "animal": "le monde des animaux",
    "food": "le plaisir de la table",
    "nature": "la beauté de la nature",
    "place": "un endroit à visiter",
    "art": "le monde des arts",
    "science": "le monde de la science",
    "sport": "un sport ou un jeu",
    "object": "un objet de tous les jours",
    "life": "la vie de tous les jours",
}
_BY_KIND = {
    "animal": (
        "Ce sont des animaux curieux qui vivent souvent près de la nature.",
        "Ces animaux cherchent leur nourriture et dorment longtemps.",
        "Ils ont besoin d'eau, de calme et d'espace pour vivre bien.",
    ),
    "food": (
        "C'est très bon, surtout quand tout est frais et préparé à la maison.",
        "On peut en manger à midi ou le soir, avec un peu de pain.",
        "C'est simple, c'est délicieux et c'est bon pour la santé.",
    ),
    "nature": (
        "C'est une merveille que l'on peut admirer toute l'année.",
        "La nature est belle et il faut la protéger.",
        "Il fait bon se promener dehors quand le ciel est bleu.",
    ),
    "place": (
        "C'est un endroit magnifique, avec une longue histoire.",
        "On peut y voir de belles rues, des gens et des monuments.",
        "C'est une bonne idée de visiter cet endroit pendant les vacances.",
    ),
    "art": (
        "C'est un art qui donne beaucoup de joie et d'émotion.",
        "Il faut du temps et de la patience pour bien apprendre.",
        "Cela permet de raconter une histoire et de partager des idées.",
    ),
    "science": (
        "C'est une chose importante que les savants étudient depuis longtemps.",
        "Grâce à la science, nous comprenons mieux le monde.",
        "C'est un peu difficile, mais c'est très intéressant.",
    ),
    "sport": (
        "C'est une activité qui fait du bien au corps et à l'esprit.",
        "Il faut pratiquer un peu chaque jour pour faire des progrès.",
        "On peut jouer avec des amis, en ville ou à la campagne.",
    ),
    "object": (
        "C'est très utile dans la vie de tous les jours.",
        "On peut en acheter dans un magasin de la ville.",
        "Il faut choisir avec soin, car la qualité est importante.",
    ),
    "life": (
        "C'est une chose importante dans la vie de chacun.",
        "Il faut prendre son temps et écouter les autres.",
        "La vie est plus belle quand on la partage avec des amis.",
    ),
}


def french_answer(prompt: Prompt, rng: random.Random) -> str:
    """An opening that names topic and kind, and one sentence about the kind."""
    topic = prompt.topic
    opening = rng.choice(_OPENINGS).format(topic=topic.name, kind=_KINDS[topic.kind])
    return f"{opening} {rng.choice(_BY_KIND[topic.kind])}"
